"""Arrays of a build that grow with the number of vectors: files mapped into memory, not DRAM that is taken."""

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["mapped_array"]

_BLOCK_BYTES = 1 << 20


def mapped_array(folder: Path, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an array of zeros in a file without a name, which ends with the array.

    The system writes its pages to the file where it needs their memory.

    Parameters
    ----------
    folder
        An existing directory on a disk with room for the array.
    shape, dtype
        Of the array.

    Raises
    ------
    OSError
        When the disk is full.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if not size:
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile(dir=folder) as file:
        # A page without room on the disk would end the process later.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            for start in range(0, size, _BLOCK_BYTES):
                file.write(bytes(min(_BLOCK_BYTES, size - start)))
            file.flush()
        return np.frombuffer(mmap.mmap(file.fileno(), size), dtype).reshape(shape)
