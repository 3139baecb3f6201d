"""Where a buffer's ways end: interrupted, damaged, emptied, opened otherwise, very large."""

import tracemalloc
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memhier.errors import ClosedError, CorruptionError
from memhier.io.reader import PendingRead
from memhier.log.record_log import committed_keys
from memhier.recsys.replay import CarouselBuffer, ClassBalanced, DeckSwap, Field, GateSwap, RandomSwap, StoredSamples
from memhier.recsys.replay.placement.placement import Placement
from memhier.recsys.replay.storage.index import IndexTable
from memhier.recsys.replay.storage.storage import Storage
from memhier.store.store import Store

IMAGE = {"image": ("uint8", (8, 8, 3))}
A_PAGE = 4096 // 192  # images


def images(ids: np.ndarray) -> dict[str, Any]:
    return {"image": np.repeat(ids.astype(np.uint8), 192).reshape(len(ids), 8, 8, 3)}


def filled(place: Path, count: int = 60, **options: Any) -> CarouselBuffer:
    buffer = CarouselBuffer(place, **{"memory": 20, "schema": IMAGE, "seed": 3, **options})
    ids = np.arange(count)
    buffer.add(images(ids), labels=ids % 4)
    buffer.checkpoint()
    return buffer


def damage(place: Path, page: int) -> None:
    victim = next(file for file in (place / "segments").iterdir() if file.name.startswith("samples-0."))
    data = bytearray(victim.read_bytes())
    data[4096 * page] ^= 1
    victim.write_bytes(data)


# Interrupted.


def test_an_interrupted_add_closes_the_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with filled(tmp_path / "b") as buffer:
        monkeypatch.setattr(Storage, "append", interrupt)
        with pytest.raises(KeyboardInterrupt):
            buffer.add(images(np.arange(3)), labels=[0, 1, 2])
        monkeypatch.undo()
        with pytest.raises(ClosedError, match="open it again"):
            buffer.checkpoint()
    with CarouselBuffer.open(tmp_path / "b") as buffer:
        assert buffer.stats()["storage_samples"] == 60


def test_a_swap_whose_wait_was_interrupted_arrives_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    swap = {"swap": RandomSwap(1.0)}
    with filled(tmp_path / "b", **swap) as buffer, filled(tmp_path / "twin", **swap) as twin:
        for each in (buffer, twin):
            used = each.sample(5)
            each.feedback(used)
        with monkeypatch.context() as patch:
            patch.setattr(Future, "done", lambda _: False)
            patch.setattr(Future, "exception", interrupt)
            patch.setattr(PendingRead, "exception", interrupt)
            with pytest.raises(KeyboardInterrupt):
                buffer.feedback([])
        assert buffer.reader().ids()[used.slots].tolist() == used.ids.tolist()
        buffer.feedback([])
        twin.feedback([])
        assert not np.isin(used.ids, twin.reader().ids()).any()
        assert buffer.reader().ids().tolist() == twin.reader().ids().tolist()


def test_a_checkpoint_that_ran_out_of_memory_is_not_followed_by_half_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> None:
        raise MemoryError

    with filled(tmp_path / "b") as buffer:
        buffer.add(images(np.arange(100)), labels=np.zeros(100, np.int64))
        monkeypatch.setattr(IndexTable, "pack", fails)
        with pytest.raises(MemoryError):
            buffer.checkpoint()
        monkeypatch.undo()
        with pytest.raises(ClosedError, match="a change failed"):
            buffer.checkpoint()
    with CarouselBuffer.open(tmp_path / "b") as buffer:
        assert buffer.stats()["storage_samples"] == 60
        assert buffer.check() == []


# Damaged.


def test_a_buffer_with_damage_in_memory_can_be_opened(tmp_path: Path) -> None:
    filled(tmp_path / "b", memory=70).close()
    damage(tmp_path / "b", 1)
    with pytest.warns(RuntimeWarning, match=rf"ids \[{A_PAGE}, .* are damaged"):
        buffer = CarouselBuffer.open(tmp_path / "b")
    with buffer:
        batch = buffer.sample(70)
        assert sorted(batch.ids) == [*range(A_PAGE), *range(2 * A_PAGE, 60)]
        assert batch["image"][:, 0, 0, 0].tolist() == batch.ids.tolist()
        assert buffer.stats()["errors"] == A_PAGE
        assert buffer.forget({"id": range(A_PAGE, 2 * A_PAGE)})["samples"] == A_PAGE
        assert buffer.check() == []


def test_damage_in_memory_is_found_in_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CarouselBuffer(tmp_path / "b", memory=256, schema={"x": ("int64", 512)}) as buffer:  # a page each
        buffer.add({"x": np.repeat(np.arange(256), 512).reshape(256, 512)})
        buffer.checkpoint()
    damage(tmp_path / "b", 77)
    reads: list[int] = []
    read = Storage.read

    def counted(tier: Storage, positions: np.ndarray, columns: Any) -> None:
        reads.append(len(positions))
        read(tier, positions, columns)

    monkeypatch.setattr(Storage, "read", counted)
    with pytest.warns(RuntimeWarning, match=r"ids \[77\] are damaged"):
        buffer = CarouselBuffer.open(tmp_path / "b")
    with buffer:
        assert sorted(buffer.sample(256).ids) == [*range(77), *range(78, 256)]
    assert len(reads) <= 1 + 2 * 8 + 1  # halves of halves; batches drawn ahead, of which there are none


def test_damage_that_would_move_is_told_before_anything_changes(tmp_path: Path) -> None:
    last = 9 * A_PAGE
    with filled(tmp_path / "c", count=200, memory=5) as buffer:
        damage(tmp_path / "c", 9)
        before = buffer.stats()
        for change in (lambda: buffer.forget({"id": [0]}), lambda: buffer.resize(storage=195)):
            with pytest.raises(CorruptionError) as caught:
                change()
            assert "nothing has changed; the damaged samples of ids [" in caught.value.__notes__[-1]
            after = buffer.stats()
            for name in ("storage_samples", "storage_limit", "memory_samples", "arrivals", "seen"):
                assert after[name] == before[name], name
        assert buffer.forget({"id": [0, *range(last, 200)]})["samples"] == 1 + 200 - last
        assert buffer.check() == []


# Emptied.


def test_a_buffer_that_has_forgotten_everything_is_as_new(tmp_path: Path) -> None:
    with filled(tmp_path / "b", storage=30) as buffer:
        assert buffer.forget(lambda ids, labels: ids >= 0)["samples"] == 30
        assert buffer.stats()["storage_limit"] == 30
        buffer.add(images(np.arange(40)), labels=np.arange(40) % 4)
        assert (buffer.stats()["storage_samples"], len(buffer)) == (30, 20)


def test_the_index_shrinks_with_storage(tmp_path: Path) -> None:
    with filled(tmp_path / "b", count=1000) as buffer:
        buffer.forget(lambda ids, labels: ids >= 70)
    # Two rows of positions, one of slots.
    with Store.open(tmp_path / "b", "replay", writable=False) as store:
        assert committed_keys(store, "index") == 3


@pytest.mark.parametrize("codec", ["jpeg", "none"])
def test_samples_that_move_in_storage_stay_the_same(tmp_path: Path, codec: str) -> None:
    pytest.importorskip("PIL")
    pictures = np.random.default_rng(0).integers(0, 256, (30, 16, 16, 3), np.uint8)
    schema = {"image": ("uint8", (16, 16, 3)), "logits": Field("float32", (3,), mutable=True)}
    with CarouselBuffer(tmp_path / "b", memory=30, schema=schema, codec={"image": codec, "logits": "int8"}) as buffer:
        logits = np.random.default_rng(1).normal(size=(30, 3)).astype(np.float32)
        buffer.add({"image": pictures, "logits": logits})
        buffer.forget({"id": range(10)})
        shown = buffer.reader().read(buffer.occupied())
        with StoredSamples(tmp_path / "b") as storage:
            stored = storage.read([storage.ids.tolist().index(id) for id in shown.ids.tolist()])
        for name, values in stored.data.items():
            np.testing.assert_array_equal(shown[name], values)


# Exemplars.


def test_a_sample_held_while_it_leaves_is_there_once(tmp_path: Path) -> None:
    schema = {"x": "int64", "logit": Field("float32", mutable=True)}
    with CarouselBuffer(tmp_path / "b", memory=4, schema=schema, swap=RandomSwap(1.0)) as buffer:
        ids = np.arange(8)
        buffer.add({"x": ids, "logit": ids.astype(np.float32)})
        used = buffer.sample(2)
        buffer.feedback(used, update={"logit": -1 - used.ids.astype(np.float32)})
        assert buffer.hold(used.ids) == 2
        for _ in range(2):
            inside = buffer.sample(4)
            assert len(set(inside.ids.tolist())) == len(inside)
            assert set(used.ids.tolist()) <= set(inside.ids.tolist())
            for id, value in zip(inside.ids.tolist(), inside["logit"].tolist(), strict=True):
                assert value == (-1 - id if id in used.ids else id)
            buffer.feedback([])
        assert len(buffer) == 4


# Opened otherwise.


@pytest.mark.parametrize("before", [None, RandomSwap, DeckSwap])
@pytest.mark.parametrize("after", [RandomSwap, DeckSwap])
def test_it_goes_on_with_another_policy(tmp_path: Path, before: Any, after: Any) -> None:
    with filled(tmp_path / "b", swap=before and before(0.5)) as buffer:
        buffer.feedback(buffer.sample(4))
        buffer.checkpoint()
    with CarouselBuffer.open(tmp_path / "b", swap=after(1.0)) as buffer:
        for _ in range(3):
            buffer.feedback(buffer.sample(4))
        assert buffer.stats()["swapped"] >= 4


def test_classes_that_were_not_kept_cannot_be_balanced(tmp_path: Path) -> None:
    filled(tmp_path / "b", same_class=False).close()
    with pytest.raises(ValueError, match="admit='class_balanced'"):
        CarouselBuffer.open(tmp_path / "b", admit=ClassBalanced())
    filled(tmp_path / "c").close()
    with CarouselBuffer.open(tmp_path / "c", admit=ClassBalanced()) as buffer:
        buffer.add(images(np.arange(8)), labels=np.arange(8) % 4)


# Arguments.


def test_images_that_cannot_be_packed_are_refused_at_once(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    with pytest.raises(ValueError, match="codec='webp'"):
        CarouselBuffer(tmp_path / "b", memory=2, schema={"image": ("uint8", (16_384, 2))}, codec={"image": "webp"})
    assert not (tmp_path / "b").exists()


def test_scores_without_a_shape_are_refused(tmp_path: Path) -> None:
    with filled(tmp_path / "b", swap=GateSwap(1.0)) as buffer:
        for scores in (1.0, np.zeros((4, 0))):
            with pytest.raises(ValueError, match="logits"):
                buffer.feedback(buffer.sample(4), scores=scores)
        assert buffer.step == 0


# Very large.


def test_memory_of_many_slots_comes_back(tmp_path: Path) -> None:
    # The state of the slots is larger than a value of the catalog may be.
    with CarouselBuffer(tmp_path / "b", memory=600_000, schema={"x": "int8"}) as buffer:
        buffer.add({"x": np.arange(50, dtype=np.int8)})
        buffer.checkpoint()
    with StoredSamples(tmp_path / "b") as stored:
        assert sorted(stored.in_memory) == list(range(50))
    with CarouselBuffer.open(tmp_path / "b", memory=10) as buffer:
        assert (buffer.capacity, len(buffer)) == (10, 10)
        buffer.checkpoint()
    with CarouselBuffer.open(tmp_path / "b", memory=600_000) as buffer:
        assert len(buffer) == 10
        buffer.checkpoint()
    with CarouselBuffer.open(tmp_path / "b") as buffer:
        assert (buffer.capacity, len(buffer)) == (600_000, 10)


def test_the_state_of_slots_is_counted() -> None:
    tracemalloc.start()
    placement = Placement(0, 100_000, None, False)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held <= placement.memory_bytes + 50_000


@pytest.mark.parametrize("admit", ["ring", "reservoir"])
def test_a_checkpoint_after_much_was_forgotten_opens(tmp_path: Path, admit: str) -> None:
    """Positions dealt by a deck, and that a ring replaces next, may lie beyond the samples that are left."""
    schema = {"x": "int64"}
    with CarouselBuffer(
        tmp_path / "b", memory=8, storage=60, schema=schema, swap="deck", admit=admit, delay=2
    ) as buffer:
        for start in range(0, 100, 10):
            numbers = np.arange(start, start + 10)
            buffer.add({"x": numbers}, ids=numbers)
            buffer.feedback(buffer.sample(4))
        buffer.forget({"id": sorted(set(range(100)) - set(buffer.sample(4).ids.tolist()))[:95]})
        buffer.checkpoint()
        expected = [buffer.sample(2).ids.tolist() for _ in range(3)]
    with CarouselBuffer.open(tmp_path / "b") as buffer:
        assert [buffer.sample(2).ids.tolist() for _ in range(3)] == expected


@pytest.mark.parametrize(
    "members",
    [
        [("a", "<i2"), ("b", ">f8", (2,))], [("a", "S3"), ("b", [("c", "<f4", (3, 2)), ("d", "?")], (2,))],
        [(("a title", "a"), "<i4"), ("b", "f2")],
        {"names": ["a", "b"], "formats": ["u1", "f4"], "offsets": [0, 8], "itemsize": 16},
    ],
    ids=["array", "arrays within", "title", "padding"],
)  # fmt: skip
def test_structured_samples_of_every_kind_come_back(tmp_path: Path, members: Any) -> None:
    kind = np.dtype(members)
    values = np.zeros(20, kind)
    values["a"] = np.arange(20)
    values["b"][3:] = np.ones((), kind["b"])
    with CarouselBuffer(tmp_path / "b", memory=4, schema={"x": kind}, seed=1) as buffer:
        buffer.add({"x": values})
        buffer.checkpoint()
        with buffer.dataset() as stored:
            read = stored.read(np.arange(20))
    with CarouselBuffer.open(tmp_path / "b", schema={"x": kind}) as buffer:
        inside = buffer.sample(4)
    for batch in (read, inside):
        assert batch["x"].dtype == kind
        for member in ("a", "b"):
            assert batch["x"][member].tobytes() == values[batch.ids][member].tobytes()
