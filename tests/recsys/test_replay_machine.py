"""A buffer put through anything, next to plain dicts: each sample is in its place, and as it came."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memhier.recsys.replay import CarouselBuffer, DeckSwap, Field, RandomSwap

SCHEMA = {"x": ("int64", 3), "text": Field("uint8", (None,), longest=5), "logits": Field("float32", (2,), mutable=True)}


def samples(ids: np.ndarray) -> dict[str, Any]:
    """Return samples that can be told from their ids."""
    return {
        "x": ids[:, None] * np.arange(1, 4),
        "text": [bytes(int(id) % 256 for _ in range(int(id) % 6)) for id in ids],
        "logits": np.stack([ids, -ids], axis=1).astype(np.float32),
    }


def is_consistent(buffer: CarouselBuffer, logits: dict[int, float]) -> None:
    """Assert that all that the buffer knows of its samples fits together, and fits the samples that came."""
    placement, members, memory = buffer._placement, buffer._placement.members, buffer.reader()
    size = members.size
    assert len(set(members.ids.tolist())) == size
    assert placement.limit is None or size <= placement.limit
    for number, group in members.groups.items():
        assert (members.group_of(members.labels[group.positions]) == number).all()
        assert members.ranks[group.positions].tolist() == list(range(group.size))
    assert sum(group.size for group in members.groups.values()) == size

    columns = buffer.schema.empty(size)
    buffer._storage.read(np.arange(size), columns)
    expected = buffer.schema.check(samples(members.ids))[1]
    for name in ("x", "text", "text.length"):
        np.testing.assert_array_equal(columns[name], expected[name])

    planned = placement.planned[placement.planned >= 0]
    assert len(set(planned.tolist())) == len(planned) == placement.planned_count
    assert placement.slot_of[planned].tolist() == np.flatnonzero(placement.planned >= 0).tolist()
    assert np.count_nonzero(placement.slot_of >= 0) == len(planned)
    groups, counts = np.unique(members.group_of(members.labels[planned]), return_counts=True)
    assert {group: count for group, count in placement.of_group.items() if count} == dict(
        zip(groups.tolist(), counts.tolist(), strict=True)
    )

    shown = np.flatnonzero(placement.visible >= 0)
    assert sorted(placement.occupied().tolist()) == shown.tolist()
    positions = placement.visible[shown]
    assert len(set(positions.tolist())) == len(positions)
    assert memory.ids()[shown].tolist() == members.ids[positions].tolist()
    assert memory.labels()[shown].tolist() == members.labels[positions].tolist()
    batch = memory.read(shown)
    expected = buffer.schema.check(samples(batch.ids))[1]
    for name in ("x", "text", "text.length"):
        np.testing.assert_array_equal(batch.data[name], expected[name])
    assert batch["logits"][:, 0].tolist() == [logits.get(id, float(id)) for id in batch.ids.tolist()]


OPERATIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 9)),
    st.tuples(st.just("step"), st.integers(0, 6)),
    st.tuples(st.just("update"), st.integers(1, 6)),
    st.tuples(st.just("checkpoint"), st.just(0)),
    st.tuples(st.just("reopen"), st.just(0)),
    st.tuples(st.just("forget"), st.integers(0, 12)),
    st.tuples(st.just("forget class"), st.integers(0, 2)),
    st.tuples(st.just("memory"), st.integers(1, 12)),
    st.tuples(st.just("storage"), st.integers(1, 30)),
)


@settings(max_examples=60, deadline=None)
@given(
    operations=st.lists(OPERATIONS, max_size=25),
    admit=st.sampled_from(["reservoir", "class_balanced", "ring", "everything"]),
    limit=st.sampled_from([None, 3, 20]),
    delay=st.integers(0, 3),
    slots=st.integers(1, 8),
    deck=st.booleans(),
    same_class=st.sampled_from([None, False]),
)
@example(operations=[("add", 4), ("memory", 2), ("update", 1)], admit="reservoir", limit=None, delay=0, slots=1,
         deck=False, same_class=None)  # fmt: skip
def test_nothing_is_ever_out_of_place(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, int]], admit: str, limit: int | None,
    delay: int, slots: int, deck: bool, same_class: bool | None,
) -> None:  # fmt: skip
    if admit == "everything":
        limit = None
    if admit == "class_balanced":
        same_class = None
    place = tmp_path_factory.mktemp("replay") / "buffer"
    swap = DeckSwap(0.7) if deck else RandomSwap(0.7)
    buffer = CarouselBuffer(place, memory=slots, storage=limit, schema=SCHEMA, admit=admit, swap=swap, seed=3,
                            delay=delay, same_class=same_class)  # fmt: skip
    logits: dict[int, float] = {}
    durable: dict[int, float] = {}
    following = 0
    try:
        for operation, number in operations:
            if operation == "add":
                ids = np.arange(following, following + number)
                following += number
                buffer.add(samples(ids), labels=ids % 3, ids=ids)
            elif operation == "step":
                buffer.feedback(buffer.sample(number))
            elif operation == "update":
                batch = buffer.sample(number)
                values = np.stack([batch.ids + 0.5, -batch.ids], axis=1).astype(np.float32)
                buffer.feedback(batch, update={"logits": values})
                logits |= {id: id + 0.5 for id in batch.ids.tolist()}
            elif operation == "checkpoint":
                buffer.checkpoint()
                durable = dict(logits)
            elif operation == "reopen":
                buffer.close()
                buffer = CarouselBuffer.open(place)
                logits = dict(durable)
                following = buffer.stats()["arrivals"]
            elif operation == "forget":
                gone = set(buffer.stored_ids().tolist()) & {number, number + 1}
                assert buffer.forget({"id": [number, number + 1]})["samples"] == len(gone)
                assert not gone & set(buffer.stored_ids().tolist())
                durable = dict(logits)
            elif operation == "forget class":
                buffer.forget({"label": number})
                assert number not in buffer._placement.members.labels
                durable = dict(logits)
            elif operation == "memory":
                buffer.resize(memory=number)
            elif limit is not None and number <= buffer.stats()["storage_samples"]:
                buffer.resize(storage=number)
            is_consistent(buffer, logits)
        assert all(finding.harmless for finding in buffer.check())
    finally:
        buffer.close()


@pytest.mark.parametrize("admit", ["reservoir", "class_balanced", "ring", "everything"])
@pytest.mark.parametrize("delay", [1, 3])
def test_nothing_is_out_of_place_in_a_long_run(tmp_path: Path, admit: str, delay: int) -> None:
    """Samples come all the time, take the places of others that are on their way, and change while they are away."""
    limit = None if admit == "everything" else 14
    with CarouselBuffer(tmp_path / "b", memory=6, storage=limit, schema=SCHEMA, admit=admit, swap=RandomSwap(1.0),
                        seed=8, delay=delay) as buffer:  # fmt: skip
        placement = buffer._placement
        logits: dict[int, float] = {}
        waiting: dict[int, int] = {}
        for step in range(60):
            count = 3 if limit else 1
            ids = np.arange(step * count, (step + 1) * count)
            buffer.add(samples(ids), labels=ids % 3, ids=ids)
            is_consistent(buffer, logits)
            batch = buffer.sample(3)
            values = np.stack([batch.ids + step / 256, -batch.ids], axis=1).astype(np.float32)
            before = placement.swapped.copy()
            buffer.feedback(batch, update={"logits": values})
            logits |= {id: id + step / 256 for id in batch.ids.tolist()}
            is_consistent(buffer, logits)
            # A slot is not swapped again before its swap has arrived.
            for slot in np.flatnonzero(placement.swapped != before).tolist():
                assert step - waiting.get(slot, -99) > delay
                waiting[slot] = step
        assert len(waiting) == 6
        assert buffer.stats()["swapped"] > 20


@pytest.mark.long
@pytest.mark.parametrize("delay", [1, 2, 3])
def test_samples_on_their_way_can_be_forgotten(tmp_path: Path, delay: int) -> None:
    """A slot whose swap comes to nothing keeps its sample, which another swap may be bringing elsewhere."""
    with CarouselBuffer(tmp_path / "b", memory=6, schema=SCHEMA, swap=RandomSwap(1.0), seed=8, delay=delay) as buffer:
        under_way, logits = buffer._swapper.under_way, dict[int, float]()
        buffer.add(samples(np.arange(10)), ids=np.arange(10))
        for step in range(40):
            buffer.add(samples(np.array([10 + step])), ids=[10 + step])
            batch = buffer.sample(2)
            values = np.stack([batch.ids + step / 256, -batch.ids], axis=1).astype(np.float32)
            buffer.feedback(batch, update={"logits": values})
            logits |= {id: id + step / 256 for id in batch.ids.tolist()}
            is_consistent(buffer, logits)
            if under_way:
                coming = under_way[0].positions
                buffer.forget({"id": buffer.stored_ids()[coming[coming >= 0][:1]]})
                is_consistent(buffer, logits)
        assert buffer.stats()["swapped"] > 3
