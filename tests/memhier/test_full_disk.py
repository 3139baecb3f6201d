"""A full disk: the call says so and changes nothing; once there is room, it is made again, and nothing is lost."""

import errno
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memhier.errors import ClosedError
from memhier.files import Fault, FaultyFiles, RealFiles
from memhier.policies import LRU
from memhier.store.store import Store
from memhier.table.tiered import KIND, Tiered

WIDTH, KEYS = 1024, 400


@contextmanager
def largest_file(limit: int) -> Iterator[None]:
    """Let no file of this process grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def tier_of(store: Any) -> Tiered:
    return Tiered(store, "t", np.float32, WIDTH, rows=KEYS, dram="8MiB", policy=LRU(24), key_space=KEYS)


def again(call: Callable[[], Any], failures: list[OSError]) -> Any:
    """Make a call until there is room."""
    while True:
        try:
            return call()
        except ClosedError:
            raise
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            failures.append(error)


def life(tier: Tiered, failures: list[OSError]) -> dict[int, float]:
    """Write rows over and over, with checkpoints of both kinds; return the rows."""
    rng, held = np.random.default_rng(0), dict.fromkeys(range(KEYS), 0.0)
    for step in range(60):
        keys = rng.permutation(KEYS)[:20]
        rows = np.repeat(np.float32([[step + 1]]), 20, 0).repeat(WIDTH, 1)
        again(lambda keys=keys, rows=rows: tier.scatter(keys, rows), failures)
        held |= dict.fromkeys(keys.tolist(), float(step + 1))
        if step % 20 == 9:
            again(tier.checkpoint, failures)
        if step % 20 == 19:
            again(lambda: tier.start_checkpoint().result(), failures)
    return held


def check(tier: Tiered, held: dict[int, float]) -> None:
    found = tier.gather([*held], keep=False)
    assert (found == np.array([*held.values()], np.float32)[:, None]).all()


@pytest.mark.long
def test_every_write_of_rows_may_find_the_disk_full(tmp_path: Path) -> None:
    counting = FaultyFiles(RealFiles())
    with Store.create(tmp_path / "all", KIND, files=counting) as store, tier_of(store) as tier:
        life(tier, [])
    writes = [
        number
        for number, call in enumerate(counting.calls, 1)
        if call.startswith(("append tmp/room", "pwrite segments", "open-x segments", "open-w tmp/room"))
    ]
    assert len(writes) > 20
    found = 0
    for number in writes[:: len(writes) // 9]:
        for fault in (Fault.ENOSPC, Fault.SHORT_WRITE)[number % 2 :]:
            place = tmp_path / f"{number}-{fault.name}"
            failures: list[OSError] = []
            # Other calls of the threads may shift the chosen call to one that ends the tier.
            with Store.create(place, KIND, files=FaultyFiles(RealFiles(), number, fault)) as store:
                with tier_of(store) as tier:
                    try:
                        held = life(tier, failures)
                    except (ClosedError, OSError):
                        continue
                    check(tier, held)
                with tier_of(store) as tier:
                    check(tier, held)
            found += len(failures)
    assert found >= 3


def test_a_limit_that_is_lifted_loses_nothing(tmp_path: Path) -> None:
    with tier_of(tmp_path / "t") as tier:
        failures: list[OSError] = []
        held = life(tier, failures)
        assert not failures
        rows = np.full((20, WIDTH), 99, np.float32)
        refused = 0
        with largest_file(2**18):
            for start in range(0, KEYS, 20):
                keys = np.arange(start, start + 20)
                for call in (lambda keys=keys: tier.scatter(keys, rows), tier.checkpoint):
                    try:
                        call()
                    except OSError as error:
                        if error.errno != errno.EFBIG:
                            raise
                        refused += 1
                    else:
                        held |= dict.fromkeys(keys.tolist(), 99.0) if call is not tier.checkpoint else {}
                with pytest.raises(OSError, match=r"File too large|make room and call again"):
                    tier.start_checkpoint().result()
        assert refused > 20
        check(tier, held)
        tier.scatter(np.arange(20), rows[:20])
        held |= dict.fromkeys(range(20), 99.0)
        tier.checkpoint()
    with tier_of(tmp_path / "t") as tier:
        check(tier, held)


def everything(tier: Tiered, value: float) -> None:
    """Write all rows, more than DRAM has room for."""
    for start in range(0, KEYS, 20):
        tier.scatter(np.arange(start, start + 20), np.full((20, WIDTH), value, np.float32))


def test_memory_is_bounded_while_there_is_no_room(tmp_path: Path) -> None:
    with tier_of(tmp_path / "t") as tier:
        life(tier, [])
        tier.checkpoint()
        with largest_file(0):
            for step in range(40):
                with pytest.raises(OSError, match="make room"):
                    everything(tier, step)
                assert tier.memory_bytes < 8 * 2**20
        tier.checkpoint()
