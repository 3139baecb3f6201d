"""A temporary file of random bytes, for measuring the device under a folder."""

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memhier.budget import format_bytes
from memhier.files import OPEN_FLAGS

__all__ = ["random_file"]

_BLOCK = 1 << 20


@contextmanager
def random_file(folder: Path, size: int, seed: int) -> Iterator[Path]:
    """Make a file of random bytes in `folder`, on the device when this yields, and remove it on the way out.

    The device has to read every block: the file has no holes and cannot be compressed. `size` is a multiple of 1 MiB.
    """
    usable = shutil.disk_usage(folder).free * 9 // 10  # the last tenth stays free for others
    if size > usable:
        raise OSError(
            errno.ENOSPC,
            f"size={format_bytes(size)} does not fit: {format_bytes(usable)} may be used here; pass a smaller size",
            str(folder),
        )
    bits = np.random.SFC64(seed)
    # Named before it is made, inside the try: wherever an interrupt strikes, the name is there to be removed.
    file = folder / f".memhier-probe-{uuid.uuid4().hex}"
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, 0o600)
        try:
            for _ in range(size // _BLOCK):
                _write_all(descriptor, bits.random_raw(_BLOCK // 8))
            os.fsync(descriptor)
        except OSError as error:
            error.filename = str(file)
            raise
        finally:
            os.close(descriptor)
        yield file
    finally:
        file.unlink(missing_ok=True)


def _write_all(descriptor: int, words: npt.NDArray[np.uint64]) -> None:
    view = words.data.cast("B")
    while view:
        view = view[os.write(descriptor, view) :]
