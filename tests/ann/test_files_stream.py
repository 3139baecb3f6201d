"""No file is held whole: peak memory of a process that reads one much larger."""

import json
import os
import struct
import subprocess
import sys

import numpy as np
import pytest

from memhier.ann.files import write_vectors

DIMENSION = 128
HELD_MAX = 96 << 20

CODE = """
import json, sys
from importlib import import_module
import numpy as np
from memhier.ann.files import open_vectors

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) << 10

if sys.argv[1].endswith(("hdf5", "parquet")):  # their code is not what a file takes
    import_module({"hdf5": "h5py", "parquet": "pyarrow.parquet"}[sys.argv[1].rpartition(".")[2]])
before, count = peak(), 0
with open_vectors(sys.argv[1]) as vectors:
    vectors.take([0])
    for start, block in vectors.blocks():
        count += len(block)
        del block
    vectors.take(np.arange(0, vectors.count, vectors.count // 1000))
print(json.dumps([count, peak() - before]))
"""


def sparse(path, header, size):
    """A file of zeros that takes no room on disk."""
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(len(header) + size)


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
@pytest.mark.parametrize("kind", ["x.fbin", "x.npy", "column.npy", "x.fvecs", "x.hdf5", "x.parquet"])
def test_peak_memory_is_that_of_blocks(tmp_path, kind):
    path, count = tmp_path / kind, 400_000
    row_bytes = 4 * DIMENSION
    if kind == "x.fbin":
        sparse(path, struct.pack("<II", count, DIMENSION), count * row_bytes)
    elif kind.endswith(".npy"):
        np.save(path, np.zeros((0, DIMENSION), np.float32))
        header = path.read_bytes().replace(b"(0, 128)", b"(%d, 128)" % count)
        header = header.replace(b"    \n", b"\n")[:127] + b"\n"
        header = header.replace(b"False", b"True ") if kind == "column.npy" else header
        sparse(path, header, count * row_bytes)
    elif kind == "x.fvecs":
        write_vectors(path, (np.zeros((5000, DIMENSION), np.float32) for _ in range(count // 5000)))
    elif kind == "x.hdf5":
        h5py = pytest.importorskip("h5py", reason="HDF5 needs the extra hdf5")
        with h5py.File(path, "w") as file:
            file.create_dataset("train", (count, DIMENSION), np.float32, chunks=(1000, DIMENSION))
    else:
        write_parquet(path, count)
    # Arrow's own allocators give memory back after a time, which on a busy machine may be late: malloc does at once.
    settings = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CODE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=settings)
    assert done.returncode == 0, done.stderr
    read, held = json.loads(done.stdout)
    assert read == count
    assert held < HELD_MAX < count * row_bytes / 2


def write_parquet(path, count):
    """One row group as large as the file: what is held must not depend on how it was cut."""
    arrow = pytest.importorskip("pyarrow", reason="Parquet needs the extra parquet")
    from pyarrow import parquet

    values = np.tile(np.random.default_rng(0).random((1000, DIMENSION), np.float32), (count // 1000, 1))
    column = arrow.FixedSizeListArray.from_arrays(arrow.array(values.reshape(-1)), DIMENSION)
    options = {"use_dictionary": False, "compression": "none", "row_group_size": count}
    parquet.write_table(arrow.table({"v": column}), path, **options)
