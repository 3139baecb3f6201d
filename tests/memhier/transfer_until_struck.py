"""``python transfer_until_struck.py push|pull|read FOLDER`` goes on until a signal comes; an interrupt ends it.

FOLDER holds ``store``, and the backup ``far`` of it. Each round of ``push`` commits and pushes, of ``pull`` makes a
copy, of ``read`` reads in place through a small cache.
"""

import sys
import threading
from pathlib import Path

import numpy as np

from memhier import Reader, Store

EXTENT = 64 * 1024


def push(folder: Path, turn: int) -> None:
    with Store.open(folder / "store", "test", writable=True) as store:
        with store.begin() as tx:
            tx.segment(f"part-{turn % 2}").append(np.random.default_rng().integers(0, 256, 3 << 20, dtype=np.uint8))
            tx.commit()
        store.push(f"file://{folder}/far")


def pull(folder: Path, turn: int) -> None:
    Store.pull(f"file://{folder}/far", folder / f"copy-{turn % 3}")


def read(folder: Path, turn: int) -> None:
    url = f"file://{folder}/far"
    with Store.open(url, "test", cache=folder / "cache", cache_bytes=6 * EXTENT) as far, Reader() as reader:
        handle = far.attach("rows", reader)
        for start in np.random.default_rng(turn).integers(0, 60, 20):
            found = reader.read(handle, [start * EXTENT, start * EXTENT + 8], 8).view(np.int64)
            assert found.ravel().tolist() == [start * EXTENT // 8, start * EXTENT // 8 + 1]


def main(work: str, folder: Path) -> None:
    calls = {"push": push, "pull": pull, "read": read}
    calls[work](folder, 0)
    print("begun", flush=True)
    turn = 0
    try:
        while True:
            turn += 1
            calls[work](folder, turn)
    except KeyboardInterrupt:
        pass
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("memhier-transfer")]
    calls[work](folder, turn + 1)  # the same process goes on
    print("ended", *left, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
