"""Writing files of vectors: what was written comes back, and a file is there as a whole or not at all."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memhier.ann.files import open_vectors, write_vectors
from memhier.errors import LockedError
from memhier.files import Fault, FaultyFiles, MemoryFiles, RealFiles, SimulatedCrash

DTYPES = {
    ".fvecs": "<f4", ".bvecs": "u1", ".ivecs": "<i4", ".fbin": "<f4", ".f16bin": "<f2", ".u8bin": "u1", ".i8bin": "i1",
    ".ibin": "<i4", ".npy": "<f4",
}  # fmt: skip


@pytest.mark.parametrize("suffix", DTYPES)
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_written_vectors_come_back(suffix, data, tmp_path, monkeypatch):
    block_bytes = data.draw(st.sampled_from([1, 400, 8 << 20]))
    monkeypatch.setattr("memhier.ann.files._reader._BLOCK_BYTES", block_bytes)
    count, dimension = data.draw(st.sampled_from([1, 3, 97])), data.draw(st.sampled_from([1, 3, 97]))
    matrix = np.random.default_rng(count).integers(0, 127, (count, dimension)).astype(DTYPES[suffix])
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=5)))
    files = MemoryFiles()
    write_vectors("/a" + suffix, (np.asfortranarray(part) for part in np.split(matrix, cuts)), files=files)
    write_vectors("/b" + suffix, matrix[::-1][::-1], files=files)
    with open_vectors("/a" + suffix, files=files) as vectors:
        write_vectors("/c" + suffix, vectors, files=files)
    for name in "abc":
        with open_vectors(f"/{name}{suffix}", files=files) as vectors:
            assert vectors.dtype == DTYPES[suffix]
            np.testing.assert_array_equal(vectors.take(np.arange(count)), matrix)
    assert files.list("/") == [name + suffix for name in "abc"]


def test_numpy_reads_what_was_written(tmp_path):
    blocks = [np.arange(6, dtype=">i2").reshape(2, 3), np.ones((40, 3), ">i2")]
    write_vectors(tmp_path / "x.npy", blocks)
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), np.vstack(blocks))
    write_vectors(tmp_path / "x.fbin", blocks)
    assert np.fromfile(tmp_path / "x.fbin", "<u4", 2).tolist() == [42, 3]
    np.testing.assert_array_equal(np.fromfile(tmp_path / "x.fbin", "<f4", offset=8).reshape(42, 3), np.vstack(blocks))
    write_vectors(tmp_path / "x.ivecs", blocks)
    raw = np.fromfile(tmp_path / "x.ivecs", "<i4").reshape(42, 4)
    assert (raw[:, 0] == 3).all()
    np.testing.assert_array_equal(raw[:, 1:], np.vstack(blocks))


def test_one_format_becomes_another(tmp_path):
    matrix = np.random.default_rng(0).integers(0, 256, (97, 5)).astype(np.uint8)
    write_vectors(tmp_path / "x.bvecs", matrix)
    for suffix in (".u8bin", ".fvecs", ".f16bin", ".ivecs", ".npy"):
        with open_vectors(tmp_path / "x.bvecs") as vectors:
            write_vectors(tmp_path / ("y" + suffix), vectors)
        with open_vectors(tmp_path / ("y" + suffix)) as vectors:
            np.testing.assert_array_equal(vectors.take(np.arange(97)), matrix)


def test_floats_are_rounded_and_infinity_stays(tmp_path):
    write_vectors(tmp_path / "x.f16bin", np.array([[1 + 2**-20, np.inf, np.nan]]))
    with open_vectors(tmp_path / "x.f16bin") as vectors:
        np.testing.assert_array_equal(vectors.take([0]), [[1, np.inf, np.nan]])


@pytest.mark.parametrize(
    ("name", "vectors", "error", "words"),
    [
        ("x.hdf5", np.ones((2, 2)), ValueError, "'.hdf5' is not one of .fvecs"),
        ("x", np.ones((2, 2)), ValueError, "'' is not one of"),
        ("x.fvecs", np.ones(2), ValueError, r"shape \(2,\)"),
        ("x.fvecs", np.ones((2, 0)), ValueError, r"shape \(2, 0\)"),
        ("x.fvecs", np.ones((0, 2)), ValueError, "at least one vector"),
        ("x.fvecs", [], ValueError, "at least one vector"),
        ("x.fvecs", [np.ones((2, 2)), np.ones((2, 3))], ValueError, "from row 2 has dimension 3, expected 2"),
        ("x.npy", [np.ones((2, 2)), np.ones((1, 2), np.float32)], ValueError, "from row 2 has dtype float32"),
        ("x.fvecs", [np.ones((2, 2)), [["a", "b"]]], TypeError, "from row 2 has dtype <U1"),
        ("x.fvecs", np.array([[1, 2], [1, 1e39]]), ValueError, r"row 1 holds 1e\+39, which float32"),
        ("x.f16bin", [np.ones((3, 1)), np.array([[65520]])], ValueError, "row 3 holds 65520, which float16"),
        ("x.u8bin", np.ones((2, 2)), TypeError, "dtype float64, expected integers for uint8"),
        ("x.u8bin", [np.ones((3, 1), int), np.array([[1], [-1]])], ValueError, "row 4 holds -1, expected 0 to 255"),
        ("x.i8bin", np.array([[128]], np.uint8), ValueError, "row 0 holds 128, expected -128 to 127"),
        ("x.ivecs", np.array([[2**31]]), ValueError, "row 0 holds 2147483648"),
        ("x.ivecs", np.array([[2**63]], np.uint64), ValueError, "row 0 holds 9223372036854775808"),
        ("x.fvecs", 3, TypeError, "vectors=int"),
        ("x.fvecs", "y.fvecs", TypeError, "vectors=str"),
    ],
)  # fmt: skip
def test_refused_vectors_leave_nothing_behind(tmp_path, name, vectors, error, words):
    with pytest.raises(error, match=words):
        write_vectors(tmp_path / name, vectors)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(tmp_path):
    path = tmp_path / "x.fvecs"
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="never written over") as caught:
        write_vectors(path, np.ones((2, 2)))
    assert caught.value.filename == str(path)

    def blocks():
        yield np.ones((2, 2))
        (tmp_path / "y.fvecs").write_text("mine, too")

    with pytest.raises(FileExistsError):
        write_vectors(tmp_path / "y.fvecs", blocks())
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"x.fvecs": "mine", "y.fvecs": "mine, too"}


def test_one_writer_at_a_time(tmp_path):
    path = tmp_path / "x.fbin"

    def blocks():
        yield np.ones((2, 2))
        with pytest.raises(LockedError, match=r"x\.fbin is being written"):
            write_vectors(path, np.zeros((5, 2)))
        yield np.ones((1, 2))

    write_vectors(path, blocks())
    with open_vectors(path) as vectors:
        np.testing.assert_array_equal(vectors.take([0, 1, 2]), np.ones((3, 2)))


def test_a_writer_that_finishes_just_before_its_lock_is_taken_keeps_its_file(tmp_path):
    path = tmp_path / "x.fbin"

    class Overtaken(RealFiles):
        def open(self, name, mode):
            file = super().open(name, mode)
            if not path.exists():
                file.append(b"the other's vectors")
                self.rename(name, str(path))
            return file

    with pytest.raises(FileExistsError):
        write_vectors(path, np.ones((2, 2)), files=Overtaken())
    assert path.read_bytes() == b"the other's vectors"


def test_the_file_of_a_killed_writer_is_overwritten(tmp_path):
    (tmp_path / "x.bvecs.unfinished").write_bytes(bytes(1000))
    write_vectors(tmp_path / "x.bvecs", np.ones((2, 3), np.uint8))
    assert [file.name for file in tmp_path.iterdir()] == ["x.bvecs"]
    assert (tmp_path / "x.bvecs").stat().st_size == 14


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("suffix", [".fvecs", ".npy"])
def test_a_fault_at_any_call_leaves_a_whole_file_or_none(tmp_path, fault, suffix):
    matrix = np.arange(40, dtype=np.float32).reshape(20, 2)
    counted = FaultyFiles(RealFiles())
    write_vectors(tmp_path / ("all" + suffix), [matrix[:10], matrix[10:]], files=counted)
    assert len(counted.calls) > 6
    for number in range(1, len(counted.calls) + 1):
        path = tmp_path / f"{number}{suffix}"
        with pytest.raises((OSError, SimulatedCrash)):
            write_vectors(path, [matrix[:10], matrix[10:]], files=FaultyFiles(RealFiles(), number, fault))
        if path.exists():
            assert counted.calls[number - 1].startswith("sync")
            with open_vectors(path) as vectors:
                np.testing.assert_array_equal(vectors.take(np.arange(20)), matrix)
        elif fault is not Fault.CRASH and not counted.calls[number - 1].startswith("lock"):
            assert not path.with_name(path.name + ".unfinished").exists()
        else:
            write_vectors(path, matrix)


def test_a_power_cut_at_any_call_leaves_a_whole_file_or_none():
    matrix = np.arange(40, dtype=np.float32).reshape(20, 2)
    files = MemoryFiles()
    counted = FaultyFiles(files)
    write_vectors("/x.fbin", matrix, files=counted)
    assert all(image.exists("/x.fbin") for _, image in files.crashes())  # once it is written, it stays
    seen = set()
    for number in range(1, len(counted.calls) + 2):
        files = MemoryFiles()
        with suppress(SimulatedCrash):
            write_vectors("/x.fbin", matrix, files=FaultyFiles(files, number, Fault.CRASH))
        for _, image in files.crashes():
            seen.add(image.exists("/x.fbin"))
            if image.exists("/x.fbin"):
                with open_vectors("/x.fbin", files=image) as vectors:
                    np.testing.assert_array_equal(vectors.take(np.arange(20)), matrix)
    assert seen == {True, False}
