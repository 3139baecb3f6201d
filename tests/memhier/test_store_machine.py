"""A store against two dicts: any order of commits, aborts, faults, crashes, reopenings and readers left behind."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from memhier.files import Fault, FaultyFiles, Files, RealFiles, SimulatedCrash
from memhier.store.store import Store

KIND = "test"
# Where a sync costs nothing, hundreds of commits fit into a test.
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

Change = tuple[str, str, bytes]
NAMES = st.sampled_from(["a", "b", "c"])
CHANGES = st.lists(
    st.tuples(st.just("put"), NAMES, st.binary(max_size=20) | st.just(b"v" * 9000))
    | st.tuples(st.just("write"), NAMES, st.binary(max_size=20) | st.just(b"s" * 4097))
    | st.tuples(st.sampled_from(["delete", "drop"]), NAMES, st.just(b"")),
    max_size=5,
)


class StoreMachine(RuleBasedStateMachine):
    """The model is `values` and `segments` as of `generation`."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=FAST)
        self.root = Path(self.folder.name) / "s"
        self.store = Store.create(self.root, KIND)
        self.generation = 0
        self.values: dict[str, bytes] = {}
        self.segments: dict[str, bytes] = {}
        self.readers: list[tuple[Store, Any]] = []

    def plan(self, changes: list[Change]) -> tuple[list[Change], dict[str, bytes], dict[str, bytes]]:
        """Return the allowed changes, and the contents after them."""
        allowed, values, segments, touched = [], dict(self.values), dict(self.segments), set()
        for action, name, data in changes:
            if action == "put":
                values[name] = data
            elif action == "delete" and name in values:
                del values[name]
            elif action == "write" and ("written", name) not in touched:
                touched.add(("written", name))
                segments[name] = data
            elif action == "drop" and name in self.segments and not touched & {("written", name), ("dropped", name)}:
                touched.add(("dropped", name))
                del segments[name]
            else:
                continue
            allowed.append((action, name, data))
        return allowed, values, segments

    def apply(self, store: Store, changes: list[Change], commit: bool = True) -> None:
        with store.begin() as tx:
            for action, name, data in changes:
                if action == "put":
                    tx.put(name, data)
                elif action == "delete":
                    tx.delete(name)
                elif action == "write":
                    tx.segment(name).append(data)
                else:
                    tx.drop(name)
            if commit:
                tx.commit()

    @rule(changes=CHANGES)
    def commit(self, changes: list[Change]) -> None:
        allowed, self.values, self.segments = self.plan(changes)
        self.apply(self.store, allowed)
        self.generation += 1

    @rule(changes=CHANGES)
    def abort(self, changes: list[Change]) -> None:
        self.apply(self.store, self.plan(changes)[0], commit=False)

    def reopen(self, files: Files | None = None) -> None:
        self.store.close()
        self.store = Store.open(self.root, KIND, writable=True, files=files)

    @precondition(lambda self: self.generation > 0)
    @rule()
    def restart(self) -> None:
        self.reopen()
        if not self.readers:
            named = sorted(info.path.name for info in self.store.segments().values())
            assert sorted(os.listdir(self.root / "segments")) == named

    @precondition(lambda self: self.generation > 0)
    @rule(changes=CHANGES, call=st.integers(1, 70), fault=st.sampled_from(Fault))
    def fail(self, changes: list[Change], call: int, fault: Fault) -> None:
        """Reopen and commit on a layer that fails at some call; the store then has the old contents or the new."""
        allowed, values, segments = self.plan(changes)
        committed = False
        with suppress(OSError, SimulatedCrash):
            self.reopen(FaultyFiles(RealFiles(), call, fault))
            self.apply(self.store, allowed)
            committed = True
        self.reopen()
        assert self.store.generation in (
            (self.generation + 1,) if committed else (self.generation, self.generation + 1)
        )
        if self.store.generation > self.generation:
            self.generation, self.values, self.segments = self.generation + 1, values, segments

    @precondition(lambda self: self.generation > 0 and len(self.readers) < 3)
    @rule(verify=st.sampled_from(["read", "open"]))
    def read(self, verify: Any) -> None:
        reader = Store.open(self.root, KIND, verify=verify)
        self.readers.append((reader, (self.generation, self.values, self.segments)))

    @precondition(lambda self: self.readers)
    @rule()
    def stop_reading(self) -> None:
        self.readers.pop(0)[0].close()

    @invariant()
    def every_store_shows_its_generation(self) -> None:
        for store, expected in [*self.readers, (self.store, (self.generation, self.values, self.segments))]:
            values = {key: store.get(key) for key in store.keys()}  # noqa: SIM118
            segments = {name: store.read_segment(name).tobytes() for name in store.segments()}
            assert (store.generation, values, segments) == expected
            assert all(finding.harmless for finding in store.check())

    def teardown(self) -> None:
        for store in [self.store, *(reader for reader, _ in self.readers)]:
            store.close()
        self.folder.cleanup()


StoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestStoreMachine = StoreMachine.TestCase
