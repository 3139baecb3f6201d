"""Transfers that a signal ends, and several at a time: the far side is whole, the next one goes on, nothing is left."""

import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

from memhier import CorruptionError, Store, backups, check_backup, prune_backups

SCRIPT = Path(__file__).with_name("transfer_until_struck.py")
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Store.create(tmp_path / "store", "test") as store:
        with store.begin() as tx:
            tx.segment("rows").append(np.arange(64 * 8192))
            tx.commit()
        store.push(f"file://{tmp_path}/far")
    return tmp_path


def struck(work: str, folder: Path, number: int, delay: float) -> subprocess.CompletedProcess[str]:
    """Have a child work until a signal comes."""
    child = subprocess.Popen([sys.executable, str(SCRIPT), work, str(folder)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "begun\n"
    time.sleep(delay)
    child.send_signal(number)
    output, _ = child.communicate(timeout=120)
    return subprocess.CompletedProcess([], child.returncode, output)


@pytest.mark.long
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("work", ["push", "pull", "read"])
def test_a_signal_at_any_moment(folder: Path, work: str, number: signal.Signals) -> None:
    url, random = f"file://{folder}/far", np.random.default_rng([*work.encode(), number])
    for _ in range(3):
        ended = struck(work, folder, number, float(random.random()) * 0.3)
        if number == signal.SIGINT:
            assert (ended.returncode, ended.stdout) == (0, "ended\n")
        else:
            assert ended.returncode == -number
        assert check_backup(url) == []
    with Store.open(folder / "store", "test", writable=True) as store:
        store.push(url)
        prune_backups(url, 1)
        assert [each.generation for each in backups(url)] == [store.generation]
        expected = {name: store.read_segment(name) for name in store.segments()}
    assert check_backup(url) == []
    left = [path.name for path in (folder / "far").rglob("*") if path.name.startswith(".")]
    assert left == []
    for copy in (folder / "copy-1", folder / "copy-new"):
        if work != "push" or copy.name == "copy-new":
            Store.pull(url, copy)
            with Store.open(copy, "test", writable=True) as pulled:
                assert all(np.array_equal(pulled.read_segment(name), rows) for name, rows in expected.items())
                assert pulled.check() == []
    with Store.open(url, "test", cache=folder / "cache", cache_bytes="1MiB") as far:
        assert all(np.array_equal(far.read_segment(name), rows) for name, rows in expected.items())
        kept = {path.name for path in (folder / "cache").rglob("*") if path.is_file()}
        assert len(kept) == 1 + 2 * len({path.partition(".")[0] for path in kept - {"lock"}})


def push_some(folder: Path, times: int) -> None:
    for _ in range(times):
        # One that read the store before another pushed a later generation is told so.
        with Store.open(folder / "store", "test") as store, suppress(FileExistsError):
            store.push(f"file://{folder}/far")


def test_processes_push_at_a_time(folder: Path) -> None:
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=push_some, args=(folder, 5)) for _ in range(3)]
    for process in processes:
        process.start()
    generation = 1
    while any(process.is_alive() for process in processes):
        with Store.open(folder / "store", "test", writable=True) as store, store.begin() as tx:
            tx.segment("more").append(np.random.default_rng(generation).bytes(100_000))
            generation = tx.commit()
        time.sleep(0.02)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    url = f"file://{folder}/far"
    there = [each.generation for each in backups(url)]
    assert there == sorted(set(there))
    assert check_backup(url) == []
    push_some(folder, 1)
    Store.pull(url, folder / "copy")
    with Store.open(folder / "copy", "test") as copy:
        assert copy.generation == generation


def read_while_it_lasts(folder: Path, stop: float) -> None:
    """Read in place until a time; a generation that goes is an error that says so."""
    url = f"file://{folder}/far"
    while time.monotonic() < stop:
        try:
            with Store.open(url, "test", cache=folder / "cache", cache_bytes="256KiB") as far:
                assert np.array_equal(far.read_segment("rows"), np.arange(64 * 8192).view(np.uint8))
                assert len(np.unique(far.read_segment("turn"))) == 1
        except CorruptionError as error:
            if "pruned" not in str(error):
                raise


@pytest.mark.long
def test_readers_beside_pushes_that_prune(folder: Path) -> None:
    fork = multiprocessing.get_context("fork")
    with Store.open(folder / "store", "test", writable=True) as store:
        for turn in range(30):
            with store.begin() as tx:
                tx.segment("turn").append(np.full(200_000, turn, np.uint8))
                tx.commit()
            store.push(f"file://{folder}/far", keep=1)
            if turn == 0:
                stop = time.monotonic() + 4
                processes = [fork.Process(target=read_while_it_lasts, args=(folder, stop)) for _ in range(2)]
                for process in processes:
                    process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert check_backup(f"file://{folder}/far") == []


def test_an_interrupted_transfer_ends_its_threads(folder: Path, interrupts: Any) -> None:
    url = f"file://{folder}/far"
    with Store.open(folder / "store", "test", writable=True) as store:
        for call in (lambda: store.push(url, verify=True), lambda: check_backup(url), lambda: prune_backups(url, 1)):
            for _ in interrupts.every(call):
                assert [each.name for each in threading.enumerate() if each.name.startswith("memhier-transfer")] == []
    assert check_backup(url) == []


def open_there(url: str) -> int:
    with Store.open(url, "test", cache=Path(url.removeprefix("file://")).parent / "cache") as far:
        return far.generation


@pytest.mark.parametrize("look", [backups, check_backup, open_there])
def test_a_look_while_the_newest_is_replaced_sees_a_newer_one(
    folder: Path, look: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time a manifest is looked at, another process has just put a newer one in its place, some times over."""
    url, left, pushing = f"file://{folder}/far", 5, False

    def replace_newest(path: Any) -> None:
        nonlocal left, pushing
        if pushing or not left or "manifests/" not in str(getattr(path, "path", path)):
            return
        left, pushing = left - 1, True  # the push looks at manifests, too
        with Store.open(folder / "store", "test", writable=True) as store:
            with store.begin() as tx:
                tx.put("turn", str(left).encode())
                tx.commit()
            store.push(url, keep=1)
        pushing = False

    for name in ("info", "cat_file"):
        original = getattr(LocalFileSystem, name)

        def struck(self: Any, path: Any, *rest: Any, original: Any = original, **options: Any) -> Any:
            replace_newest(path)
            return original(self, path, *rest, **options)

        monkeypatch.setattr(LocalFileSystem, name, struck)
    found = look(url)
    assert left == 0
    assert found == [] if look is check_backup else found
