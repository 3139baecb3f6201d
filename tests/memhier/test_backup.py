"""Push and pull of a store: whatever fails in between, nothing is lost, and only changes move."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memhier.remote.place
from memhier import CorruptionError, FormatError, LockedError, Store, backups, check_backup, prune_backups
from memhier.benchmarks.simulated_store import FAULTS, Bucket, Killed, simulated
from memhier.remote.manifest import Manifest

URL = "simulated://bucket/store"
State = tuple[int, dict[str, bytes | None], dict[str, bytes]]


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memhier.remote.place, "FIRST_WAIT_S", 0.0)


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with simulated("bucket") as bucket:
        yield bucket


def state_of(store: Store) -> State:
    values = {key: store.get(key) for key in store.keys()}  # noqa: SIM118
    return store.generation, values, {name: store.read_segment(name).tobytes() for name in store.segments()}


def stored(path: Path) -> State:
    with Store.open(path, "test") as store:
        assert store.check() == [] or all(finding.harmless for finding in store.check())
        return state_of(store)


def change(path: Path, random: np.random.Generator) -> State:
    """Make one random commit and return the state after it."""
    new = not path.exists()
    with Store.create(path, "test") if new else Store.open(path, "test", writable=True) as store, store.begin() as tx:
        for name in random.choice(list("abcdef"), random.integers(0, 3), replace=False):
            size = int(random.choice([0, 1, 4096, 5000, 70_000]))
            tx.segment(str(name)).append(random.integers(0, 256, size, dtype=np.uint8))
        there = [name for name in store.segments() if name not in tx.written]
        if there and random.random() < 0.3:
            tx.drop(str(random.choice(there)))
        tx.put("value", random.bytes(int(random.integers(0, 50))))
        tx.commit()
        return state_of(store)


def push(path: Path, **options: Any) -> Any:
    with Store.open(path, "test") as store:
        return store.push(URL, **options)


def test_changes_kills_and_pulls_in_any_order(tmp_path: Path, bucket: Bucket) -> None:
    random = np.random.default_rng(0)
    source, copy = tmp_path / "source", tmp_path / "copy"
    states: dict[int, State] = {}
    pushed = kills = updates = 0
    for step in range(40):
        generation, *_ = latest = change(source, random)
        states[generation] = latest
        last = bucket.requests + int(random.integers(1, 60))
        bucket.fault = lambda number, last=last: "kill" if number == last else None
        try:
            push(source, keep=None if random.random() < 0.5 else 2)
            pushed = generation
        except Killed:
            kills += 1
        bucket.fault, bucket.dead = lambda number: None, False
        if there := backups(URL):
            # Either the new generation is there as a whole, or an earlier one, which no kill took away.
            assert pushed <= there[-1].generation <= generation
            pushed = there[-1].generation
            try:
                assert Store.pull(URL, copy).generation == pushed
                updates += 1
            except FileExistsError:  # the generation of the copy was pruned
                copy = tmp_path / f"copy-{step}"
                Store.pull(URL, copy)
            assert stored(copy) == states[pushed]
        assert check_backup(URL) == []
    assert min(kills, 40 - kills, updates) > 5


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_every_request_of_push_and_pull(tmp_path: Path, bucket: Bucket, fault: str) -> None:
    first = change(tmp_path / "store", np.random.default_rng(1))
    with Store.open(tmp_path / "store", "test", writable=True) as store, store.begin() as tx:
        tx.segment("more").append(np.arange(3000))
        tx.commit()
        latest = state_of(store)
    assert first != latest
    push(tmp_path / "store")
    whole = bucket.requests
    Store.pull(URL, tmp_path / "plain")
    for at in range(1, bucket.requests + 1):
        bucket.objects.clear()
        bucket.requests, bucket.dead = 0, False
        bucket.fault = lambda number, at=at: fault if number == at else None
        path = tmp_path / f"copy-{at}"
        try:
            push(tmp_path / "store")
            Store.pull(URL, path)
        except Killed:
            bucket.fault, bucket.dead = lambda number: None, False
            assert at > whole or not backups(URL) or stored_far(tmp_path) == latest
            push(tmp_path / "store")
            Store.pull(URL, path)
        bucket.fault = lambda number: None
        assert stored(path) == latest
        assert check_backup(URL) == []


def stored_far(folder: Path) -> State:
    with Store.open(URL, "test", cache=folder / "cache") as store:
        return state_of(store)


def test_only_changes_move(tmp_path: Path, bucket: Bucket) -> None:
    path = tmp_path / "store"
    with Store.create(path, "test") as store:
        with store.begin() as tx:
            big = np.random.default_rng(0).integers(0, 256, 9 << 20, dtype=np.uint8)
            tx.segment("big").append(big)
            tx.put("value", b"1")
            tx.commit()
        whole = store.push(URL)
        assert whole.moved_bytes == whole.nbytes > 9 << 20
        with store.begin() as tx:
            tx.segment("small").append(bytes(10))
            tx.put("value", b"2")
            tx.commit()
        part = store.push(URL)
        assert part.nbytes > 9 << 20
        assert part.moved_bytes < 4096 + 100
        before = bucket.received
        again = store.push(URL)
        assert (again.moved_bytes, again.moved_objects, bucket.received) == (0, 0, before)
    sent = bucket.sent
    assert Store.pull(URL, tmp_path / "copy", generation=1).moved_bytes > 9 << 20
    assert bucket.sent - sent > 9 << 20
    sent = bucket.sent
    update = Store.pull(URL, tmp_path / "copy")
    assert update.moved_bytes < 20_000
    assert bucket.sent - sent < 40_000
    assert stored(tmp_path / "copy") == stored(path)


def test_a_push_that_was_killed_goes_on(tmp_path: Path, bucket: Bucket) -> None:
    path = tmp_path / "store"
    with Store.create(path, "test") as store, store.begin() as tx:
        tx.segment("big").append(np.random.default_rng(0).integers(0, 256, 40 << 20, dtype=np.uint8))
        tx.commit()
    bucket.fault = lambda number: "kill" if bucket.received > 16 << 20 else None
    with pytest.raises(Killed):
        push(path)
    assert backups(URL) == [] if not bucket.dead else True
    bucket.fault, bucket.dead = lambda number: None, False
    assert backups(URL) == []
    there = sum(map(len, bucket.objects.values()))
    assert there > 16 << 20
    moved = push(path)
    assert moved.moved_bytes <= moved.nbytes - (16 << 20)
    Store.pull(URL, tmp_path / "copy")
    assert stored(tmp_path / "copy") == stored(path)


def test_a_pull_that_was_killed_goes_on(tmp_path: Path, bucket: Bucket) -> None:
    path = tmp_path / "store"
    with Store.create(path, "test") as store, store.begin() as tx:
        tx.segment("big").append(np.random.default_rng(0).integers(0, 256, 80 << 20, dtype=np.uint8))
        tx.commit()
    whole = push(path).nbytes
    sent = bucket.sent
    bucket.fault = lambda number: "kill" if bucket.sent > sent + (24 << 20) else None
    with pytest.raises(Killed):
        Store.pull(URL, tmp_path / "copy")
    with pytest.raises(FormatError, match="unfinished"):
        Store.open(tmp_path / "copy", "test")
    bucket.fault, bucket.dead = lambda number: None, False
    assert Store.pull(URL, tmp_path / "copy").moved_bytes <= whole - (8 << 20)
    assert stored(tmp_path / "copy") == stored(path)


def test_tampered_and_lost_objects_are_found_and_pushed_again(tmp_path: Path, bucket: Bucket) -> None:
    state = change(tmp_path / "store", np.random.default_rng(1))
    with Store.open(tmp_path / "store", "test", writable=True) as store, store.begin() as tx:
        tx.segment("more").append(np.arange(3000))
        tx.commit()
        state = state_of(store)
    push(tmp_path / "store")
    sound = dict(bucket.objects)
    for name in sound:
        for damage in (
            None,
            b"",
            sound[name][:-1],
            bytes([sound[name][0] ^ 1]) + sound[name][1:] if sound[name] else b"x",
        ):
            if damage == sound[name]:
                continue
            bucket.objects = dict(sound)
            if damage is None:
                del bucket.objects[name]
            else:
                bucket.objects[name] = damage
            if "manifests" not in name or damage is not None:
                path = tmp_path / f"copy-{name.rpartition('/')[2][:8]}-{damage is None}-{len(damage or b'')}"
                with pytest.raises(CorruptionError, match=name):
                    Store.pull(URL, path)
                assert any(name in finding for finding in check_backup(URL))
                bucket.objects.pop(name, None)
            push(tmp_path / "store")
            assert check_backup(URL) == []
    Store.pull(URL, tmp_path / "copy")
    assert stored(tmp_path / "copy") == state


def flipped(contents: bytes) -> bytes:
    return bytes([contents[0] ^ 1]) + contents[1:]


def test_a_push_that_verifies_repairs_bytes_changed_at_the_same_size(tmp_path: Path, bucket: Bucket) -> None:
    for seed in range(4):
        state = change(tmp_path / "store", np.random.default_rng(seed))
    push(tmp_path / "store")
    sound = dict(bucket.objects)
    for name in filter(sound.get, sound):
        bucket.objects = sound | {name: flipped(sound[name])}
        (finding,) = check_backup(URL)
        assert name in finding
        assert "a push with verify" in finding
        if "manifests" in name:
            with pytest.raises(CorruptionError, match="a push with verify"):
                push(tmp_path / "store")
        else:
            assert push(tmp_path / "store").moved_bytes == 0  # it trusts sizes
        moved = push(tmp_path / "store", verify=True)
        assert moved.moved_bytes == (0 if "manifests" in name else len(sound[name]))
        assert bucket.objects == sound
    assert len(sound) >= 5
    bucket.objects = {name: flipped(contents) for name, contents in sound.items() if contents}
    push(tmp_path / "store", verify=True)
    assert check_backup(URL) == []
    Store.pull(URL, tmp_path / "copy")
    assert stored(tmp_path / "copy") == state


def test_the_damage_of_an_older_generation_goes_with_it(tmp_path: Path, bucket: Bucket) -> None:
    for seed in range(2):
        change(tmp_path / "store", np.random.default_rng(seed))
        push(tmp_path / "store")
    first, second = sorted(name for name in bucket.objects if "manifests" in name)
    older, newer = (Manifest.decode(bucket.objects[name], name).sizes() for name in (first, second))
    name = next(name for name in bucket.objects if name.rpartition("/")[2] in {*older} - {*newer})
    bucket.objects[name] = flipped(bucket.objects[name])
    push(tmp_path / "store", verify=True)
    (finding,) = check_backup(URL)
    assert "prune_backups" in finding
    prune_backups(URL, keep=1)
    assert check_backup(URL) == []
    bucket.objects[first] = b"damaged"
    with pytest.raises(CorruptionError, match="a push with verify"):
        prune_backups(URL, keep=1)
    push(tmp_path / "store", verify=True)
    assert [each.number for each in backups(URL)] == [2]


def test_a_push_that_verifies_does_not_spread_damage(tmp_path: Path, bucket: Bucket) -> None:
    change(tmp_path / "store", np.random.default_rng(3))
    push(tmp_path / "store")
    sound = dict(bucket.objects)
    with Store.open(tmp_path / "store", "test") as store:
        path = next(info.path for info in store.segments().values() if info.length)
    path.write_bytes(flipped(path.read_bytes()))
    with pytest.raises(CorruptionError, match=path.name):
        push(tmp_path / "store", verify=True)
    assert bucket.objects == sound


def test_of_two_pushes_the_second_goes_behind_the_first(tmp_path: Path, bucket: Bucket) -> None:
    path = tmp_path / "store"
    change(path, np.random.default_rng(1))
    push(path)
    latest = change(path, np.random.default_rng(2))
    begun, nested = bucket.requests, []

    def meanwhile(number: int) -> None:
        # In the middle of one push another one of the same store runs, and prunes.
        if number == begun + 4 and not nested:
            nested.append(True)
            bucket.lock.release()
            try:
                push(path, keep=1)
            finally:
                bucket.lock.acquire()

    bucket.fault = meanwhile
    push(path)
    bucket.fault = lambda number: None
    assert nested
    assert check_backup(URL) == []
    assert [each.generation for each in backups(URL)] == [2]
    Store.pull(URL, tmp_path / "copy")
    assert stored(tmp_path / "copy") == latest


def test_another_store_does_not_take_the_place(tmp_path: Path, bucket: Bucket) -> None:
    for name, seed in (("one", 1), ("two", 2)):
        change(tmp_path / name, np.random.default_rng(seed))
    push(tmp_path / "one")
    with pytest.raises(FileExistsError, match="generation 1 there"):
        push(tmp_path / "two")
    change(tmp_path / "one", np.random.default_rng(3))
    push(tmp_path / "one")
    with pytest.raises(FileExistsError, match="generation 2 there"):
        push(tmp_path / "two")
    with Store.create(tmp_path / "other", "other") as store, store.begin() as tx:
        tx.commit()
        with pytest.raises(FormatError, match="kind 'test', expected 'other'"):
            store.push(URL)
    with pytest.raises(FormatError, match="expected 'other'"):
        Store.pull(URL, tmp_path / "copy", kind="other")
    # A copy with commits of its own is not overwritten, nor is anything else.
    Store.pull(URL, tmp_path / "copy")
    own = change(tmp_path / "copy", np.random.default_rng(4))
    change(tmp_path / "one", np.random.default_rng(5))
    push(tmp_path / "one")
    with pytest.raises(FileExistsError, match="something is there"):
        Store.pull(URL, tmp_path / "copy")
    assert stored(tmp_path / "copy") == own
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        Store.pull(URL, tmp_path / "folder")
    with Store.open(tmp_path / "one", "test", writable=True), pytest.raises(LockedError):
        Store.pull(URL, tmp_path / "one")


def test_nothing_there(tmp_path: Path, bucket: Bucket) -> None:
    for call in (lambda: Store.pull(URL, tmp_path / "copy"), lambda: Store.open(URL, "test", cache=tmp_path / "cache")):
        with pytest.raises(FileNotFoundError, match="no memhier backup"):
            call()
    assert not (tmp_path / "copy").exists()
    assert backups(URL) == []
    change(tmp_path / "store", np.random.default_rng(0))
    push(tmp_path / "store")
    with pytest.raises(FileNotFoundError, match="generation 7"):
        Store.pull(URL, tmp_path / "copy", generation=7)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        Store.pull(URL, tmp_path / "no" / "copy")


def test_a_place_that_always_fails(tmp_path: Path, bucket: Bucket) -> None:
    state = change(tmp_path / "store", np.random.default_rng(0))
    bucket.fault = lambda number: "error"
    with pytest.raises(OSError, match=r"failed 6 times.*injected"):
        push(tmp_path / "store")
    assert bucket.requests == 6
    with pytest.raises(OSError, match="failed 6 times"):
        Store.pull(URL, tmp_path / "copy")
    assert stored(tmp_path / "store") == state


def test_prune_leaves_what_the_kept_need(tmp_path: Path, bucket: Bucket) -> None:
    random, states = np.random.default_rng(3), []
    for _ in range(6):
        states.append(change(tmp_path / "store", random))
        push(tmp_path / "store")
    bucket.objects["store/objects/leftover"] = b"of a killed push"
    assert prune_backups(URL, 2) > 0
    assert [each.generation for each in backups(URL)] == [5, 6]
    assert check_backup(URL) == []
    for generation in (5, 6):
        Store.pull(URL, tmp_path / f"copy-{generation}", generation=generation)
        assert stored(tmp_path / f"copy-{generation}") == states[generation - 1]
    assert "store/objects/leftover" not in bucket.objects
    with pytest.raises(ValueError, match="keep=0"):
        prune_backups(URL, 0)


@pytest.mark.parametrize("scheme", ["file://", "memory://", ""])
def test_real_file_systems(tmp_path: Path, scheme: str) -> None:
    state = change(tmp_path / "store", np.random.default_rng(0))
    url = f"{scheme}{tmp_path}/far" if scheme != "memory://" else f"memory://{tmp_path.name}/far"
    with Store.open(tmp_path / "store", "test") as store:
        store.push(url)
        assert store.push(url, keep=1).moved_bytes == 0
        if scheme:
            store.copy(url)
    Store.pull(url, tmp_path / "copy")
    assert stored(tmp_path / "copy") == state
    if scheme == "file://":
        assert all(not name.startswith(".") for _, _, names in os.walk(tmp_path / "far") for name in names)


def test_an_unfinished_store_is_not_pushed(tmp_path: Path, bucket: Bucket) -> None:
    with Store.create(tmp_path / "store", "test") as store, pytest.raises(FormatError, match="unfinished"):
        store.push(URL)
    assert bucket.objects == {}


def test_damage_here_does_not_reach_the_far_side(tmp_path: Path, bucket: Bucket) -> None:
    with Store.create(tmp_path / "store", "test") as store, store.begin() as tx:
        tx.segment("rows").append(np.arange(3000))
        tx.commit()
    (file,) = (tmp_path / "store" / "segments").iterdir()
    with file.open("r+b") as damaged:
        damaged.seek(5000)
        damaged.write(b"\xff")
    with pytest.raises(CorruptionError, match="page 1"):
        push(tmp_path / "store")
    assert backups(URL) == []


def test_a_damaged_upload_is_sent_again_whatever_fails_when_it_is_read_back(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of the tries to read it fails for another reason."""
    monkeypatch.setattr("memhier.remote.parallel.IN_FLIGHT", 1)
    change(tmp_path / "s", np.random.default_rng(0))
    sent = bucket.requests
    push(tmp_path / "s")
    sent, whole = bucket.requests - sent, dict(bucket.objects)
    for first in range(1, sent + 1):
        bucket.objects.clear()
        begin = bucket.requests
        faults = {begin + first: "flipped byte", begin + first + memhier.remote.place.TRIES: "lost answer"}
        bucket.fault = faults.get
        push(tmp_path / "s")
        bucket.fault = {}.get
        assert check_backup(URL) == []
        assert whole.keys() == bucket.objects.keys()
