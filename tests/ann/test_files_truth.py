"""Ground truth in each of its forms."""

import struct

import numpy as np
import pytest

from memhier.ann.files import read_ground_truth, write_vectors
from memhier.errors import FormatError

IDS = np.array([[5, 0, 3], [2**31 - 1, 7, 7]], np.int32)
DISTANCES = np.array([[0.5, 1.5, 2], [0, 1, 1e9]], np.float32)


def big_ann(ids, distances=None, header=None):
    raw = struct.pack("<II", *(header or ids.shape)) + ids.astype("<u4").tobytes()
    return raw if distances is None else raw + distances.astype("<f4").tobytes()


def test_ivecs_and_ibin_hold_ids(tmp_path):
    for suffix in (".ivecs", ".ibin"):
        write_vectors(tmp_path / ("x" + suffix), IDS)
        truth = read_ground_truth(tmp_path / ("x" + suffix))
        assert truth.ids.dtype == np.int64
        np.testing.assert_array_equal(truth.ids, IDS)
        assert truth.distances is None


@pytest.mark.parametrize("name", ["x.bin", "x.ibin", "deep-10M", "gt.public.10K"])
def test_the_form_of_big_ann_holds_distances_too(tmp_path, name):
    (tmp_path / name).write_bytes(big_ann(IDS, DISTANCES))
    truth = read_ground_truth(tmp_path / name)
    np.testing.assert_array_equal(truth.ids, IDS)
    np.testing.assert_array_equal(truth.distances, DISTANCES)
    assert truth.distances.dtype == np.float32


def test_ids_beyond_two_to_the_31_and_none_at_all(tmp_path):
    ids = np.array([[2**32 - 2, 2**31, 2**32 - 1]], np.uint32)
    (tmp_path / "x.ibin").write_bytes(big_ann(ids))
    np.testing.assert_array_equal(read_ground_truth(tmp_path / "x.ibin").ids, [[2**32 - 2, 2**31, -1]])


def test_hdf5_holds_neighbours_and_distances(tmp_path):
    h5py = pytest.importorskip("h5py", reason="HDF5 needs the extra hdf5")
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        file["neighbors"], file["distances"] = IDS, DISTANCES.astype(np.float64)
    truth = read_ground_truth(tmp_path / "x.hdf5")
    np.testing.assert_array_equal(truth.ids, IDS)
    np.testing.assert_array_equal(truth.distances, DISTANCES)
    with h5py.File(tmp_path / "y.h5", "w") as file:
        file["neighbors"] = file["distances"] = DISTANCES
    with pytest.raises(FormatError, match=r"y.h5\['neighbors'\]: holds float32, expected integer ids"):
        read_ground_truth(tmp_path / "y.h5")
    with h5py.File(tmp_path / "z.h5", "w") as file:
        file["neighbors"], file["distances"] = IDS, DISTANCES[:1]
    with pytest.raises(FormatError, match=r"z.h5: neighbors of shape \(2, 3\) and distances of shape \(1, 3\)"):
        read_ground_truth(tmp_path / "z.h5")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "0 bytes, expected at least 8"),
        (big_ann(IDS)[:-1], "31 bytes, expected 32 .* or 56 .* 2 queries of 3 neighbours"),
        (big_ann(IDS, DISTANCES)[:-4], "52 bytes, expected 32"),
        (big_ann(IDS, DISTANCES) + b"1", "57 bytes"),
        (big_ann(IDS, header=(0, 3)), "0 queries"),
        (struct.pack("<II", 3, 0), "0 neighbours"),
        (struct.pack("<II", 2**32 - 1, 2**32 - 1), "8 bytes, expected 73,786,976,260,478,468,108"),
    ],
)
def test_damage_is_found(tmp_path, raw, words):
    (tmp_path / "x.bin").write_bytes(raw)
    with pytest.raises(FormatError, match=words) as caught:
        read_ground_truth(tmp_path / "x.bin")
    assert str(tmp_path / "x.bin") in str(caught.value)


def test_other_files_and_missing_ones(tmp_path):
    for suffix in (".fvecs", ".fbin", ".npy", ".parquet"):
        with pytest.raises(ValueError, match=f"{suffix} holds vectors, expected ground truth"):
            read_ground_truth(tmp_path / ("x" + suffix))
    for name in ("x.ivecs", "x.bin"):
        with pytest.raises(FileNotFoundError):
            read_ground_truth(tmp_path / name)
    with pytest.raises(TypeError, match="path=3"):
        read_ground_truth(3)
