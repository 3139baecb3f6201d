"""Files that others wrote, damaged on their way here: a FormatError that names file and place, never anything else."""

import gzip
import io
import json
import lzma
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memhier.ann import open_vectors, read_ground_truth, write_vectors
from memhier.benchmarks.bench.results import read_rows
from memhier.benchmarks.bench.workload import load_workload
from memhier.benchmarks.cli.index.inputs import given_ids
from memhier.benchmarks.cli.index.tables import TableFile, read_attributes, read_documents
from memhier.benchmarks.cli.traces import read_trace
from memhier.errors import FormatError
from memhier.recsys import (
    read_amazon,
    read_avazu,
    read_criteo,
    read_criteo_npy,
    read_criteo_parquet,
    read_lightgcn,
    read_movielens,
)

RNG = np.random.default_rng(0)
VECTORS = RNG.standard_normal((50, 6)).astype(np.float32)
CRITEO = "\n".join("\t".join(["1", *map(str, range(13)), *[f"{at:08x}" for at in range(26)]]) for _ in range(40)) + "\n"
AVAZU = "id,click,hour," + ",".join(f"c{at}" for at in range(21)) + "\n" + "\n".join(
    ",".join(["7", "1", "14102100", *map(str, range(21))]) for _ in range(40)
) + "\n"  # fmt: skip
RATINGS = "userId,movieId,rating,timestamp\n" + "".join(f"{at},{at + 1},3.5,9\n" for at in range(40))
PAIRS = "".join(f"{at} {at + 1} {at + 2}\n" for at in range(40))
REVIEWS = "user_id,parent_asin,rating,timestamp\n" + "".join(f"A{at},B{at},3.5,9\n" for at in range(40))
JSON_REVIEWS = "".join(f'{{"reviewerID": "A{at}", "asin": "B{at}", "overall": 5.0}}\n' for at in range(40))
KEYS = RNG.integers(0, 100, 500)

Use = Callable[[Path], Any]


def everything(blocks: Iterator[Any]) -> int:
    return sum(1 for _ in blocks)


def vectors_of(path: Path, **options: Any) -> int:
    with open_vectors(path, **options) as vectors:
        return everything(vectors.blocks())


def npy(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def written(suffix: str, folder: Path) -> bytes:
    array = VECTORS.astype(np.uint8) if suffix == ".bvecs" else VECTORS.astype(np.int32) if "i" in suffix else VECTORS
    write_vectors(folder / f"made{suffix}", array)
    return (folder / f"made{suffix}").read_bytes()


def hdf5(folder: Path) -> bytes:
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "made.hdf5", "w") as file:
        file.create_dataset("train", data=VECTORS, chunks=(10, 6), compression="gzip", fletcher32=True)
    return (folder / "made.hdf5").read_bytes()


def parquet(folder: Path, columns: dict[str, Any]) -> bytes:
    arrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    writer.write_table(arrow.table(columns), folder / "made.parquet", write_page_checksum=True)
    return (folder / "made.parquet").read_bytes()


def criteo_parquet(folder: Path) -> bytes:
    numbers = {f"int_{at}": [1.0, None] for at in range(13)}
    return parquet(folder, {"label": [0, 1]} | numbers | {f"cat_{at}": [5, 6] for at in range(26)})


def use_criteo_npy(path: Path) -> int:
    dense, sparse = path.with_name("dense.npy"), path.with_name("sparse.npy")
    dense.write_bytes(npy(np.zeros((40, 13), np.float32)))
    sparse.write_bytes(npy(np.zeros((40, 26), np.int32)))
    return everything(read_criteo_npy(path, dense, sparse, [10] * 26))


LINES = b"".join(b'{"n": %d, "text": "text %d"}\n' % (n, n) for n in range(40))

WORKLOAD = b"""
name = "x"
group = "search"
about = "y"
function = "f"
[quick]
n = 1
[full]
n = 2
"""
ROW = {"task": "a", "kind": "machine", "load": 1, "device": {}}

FILES: dict[str, tuple[Callable[[Path], bytes], Use]] = {
    "trace.txt": (lambda _: "\n".join(map(str, KEYS)).encode(), read_trace),
    "trace.txt.gz": (lambda _: gzip.compress("\n".join(map(str, KEYS)).encode(), mtime=0), read_trace),
    "trace.txt.xz": (lambda _: lzma.compress("\n".join(map(str, KEYS)).encode()), read_trace),
    "trace.npy": (lambda _: npy(KEYS), read_trace),
    "trace.npy.gz": (lambda _: gzip.compress(npy(KEYS), mtime=0), read_trace),
    "trace.npy.xz": (lambda _: lzma.compress(npy(KEYS)), read_trace),
    "trace.oracleGeneral.gz": (lambda _: gzip.compress(bytes(24 * 40), mtime=0), read_trace),
    "criteo.tsv": (lambda _: CRITEO.encode(), lambda path: everything(read_criteo(path, [10] * 26, 7))),
    "criteo.tsv.gz": (
        lambda _: gzip.compress(CRITEO.encode(), mtime=0), lambda path: everything(read_criteo(path, [10] * 26, 7)),
    ),
    "criteo.tsv.xz": (
        lambda _: lzma.compress(CRITEO.encode()), lambda path: everything(read_criteo(path, [10] * 26, 7)),
    ),
    "avazu.csv": (lambda _: AVAZU.encode(), lambda path: everything(read_avazu(path, [10] * 22, 7))),
    "avazu.csv.gz": (
        lambda _: gzip.compress(AVAZU.encode(), mtime=0), lambda path: everything(read_avazu(path, [10] * 22, 7)),
    ),
    "ratings.csv.gz": (
        lambda _: gzip.compress(RATINGS.encode(), mtime=0), lambda path: everything(read_movielens(path)),
    ),
    "reviews.csv.gz": (
        lambda _: gzip.compress(REVIEWS.encode(), mtime=0), lambda path: everything(read_amazon(path, [10, 10])),
    ),
    "reviews.json": (lambda _: JSON_REVIEWS.encode(), lambda path: everything(read_amazon(path, [10, 10]))),
    "train.txt": (lambda _: PAIRS.encode(), lambda path: everything(read_lightgcn(path))),
    "train.txt.xz": (lambda _: lzma.compress(PAIRS.encode()), lambda path: everything(read_lightgcn(path))),
    "labels.npy": (lambda _: npy(np.zeros(40, np.int32)), use_criteo_npy),
    "criteo.parquet": (criteo_parquet, lambda path: everything(read_criteo_parquet(path, [10] * 26))),
    **{
        f"vectors{suffix}": (lambda folder, suffix=suffix: written(suffix, folder), vectors_of)  # type: ignore[misc]
        for suffix in (".fvecs", ".bvecs", ".ivecs", ".fbin", ".ibin", ".npy")
    },
    "truth.ivecs": (lambda folder: written(".ivecs", folder), read_ground_truth),
    "truth.bin": (lambda _: np.array([4, 5, *range(20)], "<u4").tobytes(), read_ground_truth),
    "vectors.hdf5": (hdf5, lambda path: vectors_of(path, key="train")),
    "vectors.parquet": (lambda folder: parquet(folder, {"v": VECTORS.tolist()}), vectors_of),
    "ids.npy": (lambda _: npy(np.arange(40)), lambda path: given_ids("", str(path), None, "int64")),
    "ids.txt": (lambda _: "\n".join(map(str, range(40))).encode(), lambda path: given_ids("", str(path), None, "str")),
    "ids.parquet": (
        lambda folder: parquet(folder, {"id": list(range(40))}), lambda path: given_ids("", str(path), "id", "int64"),
    ),
    "about.parquet": (
        lambda folder: parquet(folder, {"id": list(range(40))}),
        lambda path: read_attributes(TableFile(str(path), None)),
    ),
    "texts.parquet": (
        lambda folder: parquet(folder, {"text": [f"text {n}" for n in range(40)]}),
        lambda path: [*read_documents(TableFile(str(path), None))],
    ),
    "about.jsonl": (lambda _: LINES, lambda path: read_attributes(TableFile(str(path), None))),
    "texts.jsonl": (lambda _: LINES, lambda path: [*read_documents(TableFile(str(path), None))]),
    "workload.toml": (lambda _: WORKLOAD, load_workload),
    "results.jsonl": (lambda _: (json.dumps(ROW) + "\n").encode() * 5, read_rows),
}  # fmt: skip


def damaged(whole: bytes, seed: int) -> Iterator[tuple[str, bytes]]:
    rng = random.Random(seed)
    yield "empty", b""
    for _ in range(12):
        at = rng.randrange(len(whole))
        yield f"cut at {at}", whole[:at]
    for _ in range(40):
        at = rng.randrange(len(whole)) if rng.random() < 0.5 else rng.randrange(min(len(whole), 150))
        flipped = bytearray(whole)
        flipped[at] ^= 1 << rng.randrange(8)
        yield f"a bit of byte {at}", bytes(flipped)
    at = rng.randrange(len(whole))
    yield f"no text at {at}", whole[:at] + b"\xff\xfe\x00" + whole[at:]
    yield "noise", rng.randbytes(len(whole))
    yield "noise behind", whole + rng.randbytes(100)
    for magic in (b"\x1f\x8b", b"PK\x03\x04", b"\xfd7zXZ\x00", b"\x93NUMPY\x01\x00", b"\x89HDF\r\n\x1a\n", b"PAR1"):
        yield f"begins with {magic!r}", magic + rng.randbytes(200)
    huge = b"{'descr': '<f4', 'fortran_order': False, 'shape': (17592186044416, 4)}".ljust(117) + b"\n"
    yield "a header of 2**44 rows", b"\x93NUMPY\x01\x00\x76\x00" + huge + whole
    yield "a header without an end", b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': (('".ljust(118) + whole


def complaint(use: Use, path: Path) -> str | None:
    """Return what is said of a file: a FormatError, or a ValueError where it is whole and the call does not fit it."""
    try:
        use(path)
    except ValueError as error:
        assert isinstance(error, FormatError) or type(error) is ValueError  # noqa: PT017
        return str(error)
    return None


@pytest.mark.parametrize("name", FILES)
def test_damage_is_a_format_error_with_the_path(name: str, tmp_path: Path) -> None:
    make, use = FILES[name]
    whole = make(tmp_path)
    path = tmp_path / name
    path.write_bytes(whole)
    use(path)
    refused = 0
    for title, contents in damaged(whole, len(name)):
        path.write_bytes(contents)
        said = complaint(use, path)
        if said is not None:
            assert os.fspath(tmp_path) in said, title
            refused += 1
    assert refused > 5


@pytest.mark.parametrize("name", ["criteo.tsv", "avazu.csv", "train.txt"])
def test_the_line_is_told(name: str, tmp_path: Path) -> None:
    make, use = FILES[name]
    lines = make(tmp_path).split(b"\n")
    lines[20] = b"\xff" + lines[20]
    path = tmp_path / name
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(FormatError, match=rf"{name}: line 21: .*utf-8"):
        use(path)


def test_how_far_a_trace_was_read_is_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.oracleGeneral.gz"
    path.write_bytes(gzip.compress(RNG.bytes(24 * 400_000), 1)[:-2_000_000])
    with pytest.raises(
        FormatError, match=r"oracleGeneral.gz: not a trace in .* after [1-9][\d,]* keys: .*end-of-stream"
    ):
        read_trace(path)
