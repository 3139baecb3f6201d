"""The end of a step in one call of the compiled core, against the step that Python makes."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memhier import backend
from memhier.errors import CorruptionError
from memhier.io.reader import PendingRead
from memhier.recsys.replay import CarouselBuffer, RandomSwap
from memhier.recsys.replay.policies import Pool
from memhier.recsys.replay.schema import Schema
from memhier.recsys.replay.streams import Purpose, Uniforms
from memhier.recsys.replay.swapper import Swapper

needs_core = pytest.mark.skipif(backend.core is None, reason="compares the compiled core with Python")


def columns(ids: Any) -> dict[str, Any]:
    return {"x": np.asarray(ids)[:, None] * 1000 + np.arange(700)}


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return, for each step, whether the core has ended it."""
    ended, end = [], Swapper.end_step_at_once

    def end_step_at_once(swapper: Swapper, slots: Any) -> bool:
        ended.append(end(swapper, slots))
        return ended[-1]

    monkeypatch.setattr(Swapper, "end_step_at_once", end_step_at_once)
    return ended


def run(place: Path, delay: int, memory: int | str, ratio: float) -> list[Any]:
    """Return the samples of many steps, with other calls between them."""
    seen: list[Any] = []
    size = {"x": ("int64", (700,))}
    with CarouselBuffer(
        place, memory=memory, storage=400, schema=size, seed=5, delay=delay, swap=RandomSwap(ratio)
    ) as buffer:
        buffer.add(columns(range(300)), labels=np.arange(300) % 3)
        for turn in range(150):
            batch = buffer.sample(16)
            assert (batch["x"] == columns(batch.ids)["x"]).all()
            assert (batch.labels == batch.ids % 3).all()
            seen += [batch.ids.tolist(), batch.slots.tolist()]
            # Slots that come twice are one sample.
            buffer.feedback(np.concatenate([batch.slots, batch.slots[:2]]) if turn % 10 == 3 else batch)
            if turn % 7 == 5:
                ids = np.arange(300 + 3 * turn, 303 + 3 * turn)
                buffer.add(columns(ids), labels=ids % 3, ids=ids)
                buffer.add(columns([2000 + turn]), labels=[(2000 + turn) % 3], ids=[2000 + turn])
            if turn in (20, 90):
                buffer.checkpoint()
            if turn == 40:
                buffer.hold(batch.ids + 1)
            if turn == 60:
                buffer.forget({"label": 1})
            if turn == 100:
                buffer.resize(memory=30)
        stats = buffer.stats()
        seen.append([stats[name] for name in ("step", "swapped", "under_way", "errors", "memory_samples")])
        seen.append(np.sort(buffer.stored_ids()).tolist())
        buffer.checkpoint()
        assert buffer.check() == []
    with CarouselBuffer.open(place) as buffer:
        for _ in range(20):
            batch = buffer.sample(8)
            seen.append(batch.ids.tolist())
            buffer.feedback(batch)
    return seen


@needs_core
@pytest.mark.parametrize(
    ("delay", "memory", "ratio"), [(1, 40, 0.5), (1, "2MiB", 0.5), (3, 60, 0.3), (0, 40, 0.5), (1, 350, 0.5)]
)
def test_steps_of_the_core_bring_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: list[bool], delay: int, memory: int | str, ratio: float
) -> None:
    found = run(tmp_path / "core", delay, memory, ratio)
    ended = sum(at_once)
    assert ended > 30 if delay else ended == 0
    monkeypatch.setattr(Swapper, "end_step_at_once", lambda swapper, slots: False)
    assert run(tmp_path / "python", delay, memory, ratio) == found


@needs_core
def test_positions_are_drawn_as_python_draws_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[Pool] = []

    class Kept(RandomSwap):
        def incoming(self, pool: Pool, count: int, random: np.random.Generator) -> Any:
            pools.append(pool)
            return pool.draw(count, random)

    with CarouselBuffer(tmp_path / "b", memory=40, schema={"x": "int64"}, swap=Kept()) as buffer:
        buffer.add({"x": np.arange(300)})
        buffer.feedback(buffer.sample(4))
        (pool,) = pools
        for count in (0, 1, 16, 100, 130):
            drawn = [pool.draw(count, np.random.default_rng(seed)).tolist() for seed in range(30)]
            with monkeypatch.context() as patch:
                patch.setattr(backend, "core", None)
                assert [pool.draw(count, np.random.default_rng(seed)).tolist() for seed in range(30)] == drawn


@needs_core
@pytest.mark.parametrize("count", [1, 2, 65, 1000, 10**9])
def test_distinct_integers_are_drawn_as_python_draws_them(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    drawn: list[list[int]] = []
    for core in (backend.core, None):
        monkeypatch.setattr(backend, "core", core)
        uniforms, found = Uniforms(7, Purpose.SAMPLE), []
        for n in (0, 1, 2, 32, 499, 3000):
            # From before the end of a block, too; with half of all, many are drawn anew.
            for _ in range(60 if min(n, count // 2) else 1):
                found += [*uniforms.distinct(min(n, count // 2), count).tolist(), uniforms.position]
        drawn.append(found)
    assert drawn[0] == drawn[1]


def damage(place: Path) -> None:
    """Overwrite all samples on SSD."""
    file = max((place / "segments").iterdir(), key=lambda path: path.stat().st_size)
    file.write_bytes(b"\xa5" * file.stat().st_size)


@needs_core
def test_a_damaged_sample_ends_the_step_as_ever(tmp_path: Path, at_once: list[bool]) -> None:
    with CarouselBuffer(tmp_path / "b", memory=20, schema={"x": ("int64", (700,))}, seed=2) as buffer:
        buffer.add(columns(range(100)))
        buffer.checkpoint()
        for _ in range(4):
            buffer.feedback(buffer.sample(8))
        assert at_once[-1]
        damage(tmp_path / "b")
        step, held = buffer.step, buffer.reader().ids()
        with suppress(CorruptionError):  # its swap may have been read before
            buffer.feedback(buffer.sample(8))
        for _ in range(2):
            with pytest.raises(CorruptionError) as failure:
                buffer.feedback(buffer.sample(8))
            assert "could not be swapped in" in failure.value.__notes__[0]
        assert buffer.step == step + 3
        assert buffer.stats()["errors"] >= 2
        assert np.isin(buffer.reader().ids(), held).sum() >= 16
        batch = buffer.sample(20)
        assert (batch["x"] == columns(batch.ids)["x"]).all()


@needs_core
def test_an_interrupted_step_ends_or_does_not(tmp_path: Path, at_once: list[bool], interrupts: Any) -> None:
    with CarouselBuffer(tmp_path / "b", memory=20, schema={"x": ("int64", (700,))}, seed=2) as buffer:
        buffer.add(columns(range(100)))
        buffer.checkpoint()
        step = buffer.step
        drawn: list[Any] = [buffer.sample(8)]
        call: Callable[[], None] = lambda: buffer.feedback(drawn[-1])  # noqa: E731
        for _ in interrupts.every(call):
            assert buffer.step in (step, step + 1)
            interrupts.settled(buffer.step > step)
            for _ in range(2):
                batch = buffer.sample(20)
                assert len(set(batch.ids.tolist())) == 20
                assert (batch["x"] == columns(batch.ids)["x"]).all()
                buffer.feedback(batch)
            step = buffer.step
            drawn.append(buffer.sample(8))
        assert sum(at_once) > 20
        buffer.checkpoint()
        assert buffer.check() == []


@needs_core
def test_a_buffer_closes_while_it_reads(tmp_path: Path, at_once: list[bool]) -> None:
    for turn in range(10):
        buffer = CarouselBuffer(tmp_path / f"{turn}", memory=20, schema={"x": ("int64", (700,))}, seed=turn)
        buffer.add(columns(range(100)))
        buffer.checkpoint()
        buffer.feedback(buffer.sample(8))
        assert at_once[-1]
        buffer.close()


@needs_core
def test_a_step_that_python_ends_takes_no_more_room_and_counts_its_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: list[bool]
) -> None:
    made, awaited, empty, begin = [], [], Schema.empty, PendingRead.__init__

    def count(schema: Schema, samples: int) -> Any:
        made.append(samples)
        return empty(schema, samples)

    def begin_slow(read: PendingRead, *arguments: Any) -> None:
        begin(read, *arguments)
        ended = iter([False])

        def done() -> bool:
            awaited.append(read)
            return next(ended, True)

        read.done = done

    monkeypatch.setattr(Schema, "empty", count)
    monkeypatch.setattr(PendingRead, "__init__", begin_slow)
    with CarouselBuffer(tmp_path / "b", memory=20, storage=100, schema={"x": ("int64", (700,))}, seed=2) as buffer:
        buffer.add(columns(range(100)))
        buffer.checkpoint()
        batch = buffer.empty(8)
        for turn in range(60):
            if turn == 10:
                made.clear()
            buffer.feedback(buffer.sample(8, out=batch))
            if turn % 3 == 0:  # some of these come into memory soon, from DRAM
                buffer.add(columns(range(100 + 5 * turn, 105 + 5 * turn)))
        assert 5 < sum(at_once) < len(at_once) - 5
        assert made == []
        assert buffer.stats()["stalls"] >= len(set(awaited)) > 20
