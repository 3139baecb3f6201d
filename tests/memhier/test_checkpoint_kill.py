"""Checkpoints under kill -9: the last image that was saved is there, whole, or the one that was being committed."""

import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from memhier.io.reader import Reader
from memhier.store.store import Store
from memhier.table.checkpoint import CheckpointWriter, read_checkpoint

KIND = "test"
Killer = Callable[[Callable[[int], None], random.Random], int]
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
SHAPE = (97, 700)


def _next(rows: NDArray[np.uint8], version: int) -> NDArray[np.int64]:
    """Return the rows in which a version differs from the one before."""
    return np.arange(version % len(rows), len(rows), 7)


def _save_until_killed(root: Path, report: int) -> None:
    """Every image holds its generation's rows; those of the next are set while it is being saved."""
    store, rows, reader = Store.open(root, KIND, writable=True), np.zeros(SHAPE, np.uint8), Reader()
    read_checkpoint(store, "t", reader, rows)
    writer = CheckpointWriter(store, "t", rows, reader, block_bytes=4096, clean=True)
    version = store.generation
    changed = _next(rows, version + 1)
    while True:
        version += 1
        with writer.changing(changed):
            rows[changed] = version % 256
        saving = writer.start()
        changed = _next(rows, version + 1)
        with writer.changing(changed):
            rows[changed] = (version + 1) % 256
        saving.result()
        os.write(report, version.to_bytes(8, "little"))


def _kill_rounds(root: Path, rounds: int, seed: int, work_until_killed: Killer) -> None:
    rng, image, version = random.Random(seed), np.zeros(SHAPE, np.uint8), 1
    with (
        Store.create(root, KIND) as store,
        Reader() as reader,
        CheckpointWriter(store, "t", image.copy(), reader, block_bytes=4096) as writer,
    ):
        writer.write()
    for _ in range(rounds):
        returned = work_until_killed(lambda report: _save_until_killed(root, report), rng)
        with Store.open(root, KIND, verify="open") as store, Reader() as reader:
            assert store.generation in (returned, returned + 1)
            while version < store.generation:
                version += 1
                image[_next(image, version)] = version % 256
            assert np.array_equal(read_checkpoint(store, "t", reader), image)
            assert all(finding.harmless for finding in store.check())


def test_kill_during_saves(work_until_killed: Killer) -> None:
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        _kill_rounds(Path(folder) / "store", 12, 5, work_until_killed)


@pytest.mark.slow
def test_kill_during_saves_for_longer(tmp_path: Path, work_until_killed: Killer) -> None:
    _kill_rounds(tmp_path / "store", 100, 6, work_until_killed)
