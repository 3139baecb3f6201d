"""An interrupt at any line of a call leaves an index or a decoder as before the call or as after it."""

import functools
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from memhier.ann import ZoomIndex
from memhier.ann.decoder import TopKSoftmax
from memhier.ann.zoom.pauses import pausing
from memhier.ann.zoom.search import search
from memhier.errors import MemhierError
from memhier.shield import check_interrupt, uninterrupted

DIM = 12


@functools.cache
def vector_of(id: int, change: int) -> NDArray[np.float32]:
    """Return a vector that tells ids and changes apart."""
    return np.random.default_rng([id, change]).normal(size=DIM).astype(np.float32)


def vectors_of(ids: Any, change: int) -> NDArray[np.float32]:
    return np.stack([vector_of(int(id), change) for id in ids])


class Indexed:
    """An index beside a dict."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.model = dict.fromkeys(range(300), 0)
        self.index = ZoomIndex.build(place, vectors_of(range(300), 0), dram="8MiB", grow_to=2000)
        self.committed = dict(self.model)

    def matches(self, model: dict[int, int]) -> bool:
        """Whether the index is this model, as far as any call can tell."""
        if len(self.index) != len(model):
            return False
        ids = np.array(sorted(model))
        expected = np.stack([vector_of(id, model[id]) for id in ids.tolist()])
        try:
            if not np.array_equal(self.index.reconstruct(ids), expected):
                return False
        except KeyError:
            return False
        found = self.index.search(expected[:20], 1, recall=1)
        return found.ids[:, 0].tolist() == ids[:20].tolist()

    def settle(self, after: dict[int, int], interrupts: Any) -> None:
        """Find out whether the change was made; it was, or it was not, or the index refuses and its disk is right."""
        try:
            was_made = self.matches(after) and after != self.model
            assert was_made or self.matches(self.model)
            interrupts.settled(was_made)
            self.model = after if was_made else self.model
        except MemhierError:
            interrupts.seen["refused"] += 1
            self.index.close()
            self.index = ZoomIndex.open(self.place, writable=True)
            assert self.matches(self.committed)
            self.model = dict(self.committed)

    def reopen(self) -> None:
        self.index.close()
        self.index = ZoomIndex.open(self.place, writable=True)
        assert self.matches(self.committed)
        self.model = dict(self.committed)


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Indexed]:
    found = Indexed(tmp_path_factory.mktemp("interrupts") / "index")
    yield found
    found.index.close()


@pytest.mark.parametrize("way", ["add", "update", "remove"])
def test_an_interrupted_change_of_an_index_is_made_or_not(indexed: Indexed, interrupts: Any, way: str) -> None:
    turn = 0
    indexed.reopen()

    def keys() -> list[int]:
        return [1000 + 3 * turn, 1001 + 3 * turn] if way == "add" else [turn % 100, 100 + turn]

    def call() -> None:
        if way == "add":
            indexed.index.add(vectors_of(keys(), 0), ids=keys())
        elif way == "update":
            indexed.index.update(keys(), vectors_of(keys(), turn + 1))
        else:
            indexed.index.remove([100 + turn])

    for _ in interrupts.every(call):
        after = dict(indexed.model)
        if way == "remove":
            del after[100 + turn]
        else:
            after |= dict.fromkeys(keys(), 0 if way == "add" else turn + 1)
        indexed.settle(after, interrupts)
        turn += 1


def test_an_interrupted_commit_of_an_index_is_made_or_not(indexed: Indexed, interrupts: Any) -> None:
    turn = 0
    indexed.reopen()

    def call() -> None:
        indexed.index.commit(compact=turn % 7 == 6)

    for _ in interrupts.every(call):
        indexed.settle(dict(indexed.model), interrupts)
        indexed.index.close()
        indexed.index = ZoomIndex.open(indexed.place, writable=True)
        was_made = indexed.matches(indexed.model)
        assert was_made or indexed.matches(indexed.committed)
        indexed.committed = dict(indexed.model if was_made else indexed.committed)
        indexed.model = dict(indexed.committed)
        turn += 1
        keys = [5000 + turn]
        indexed.index.add(vectors_of(keys, 0), ids=keys)
        indexed.model |= dict.fromkeys(keys, 0)
    indexed.committed = dict(indexed.model)


@pytest.mark.parametrize("way", ["update", "commit"])
def test_an_interrupted_change_of_attributes_alone_is_made_or_not(tmp_path: Path, interrupts: Any, way: str) -> None:
    place, ids, turn = tmp_path / "index", np.arange(50, 100), 1
    index = ZoomIndex.build(place, vectors_of(range(300), 0), dram="8MiB", attributes={"turn": np.zeros(300, np.int64)})

    def found(value: int) -> list[int]:
        return sorted(set(index.search(vector_of(0, 0), 300, recall=1, where=f"turn == {value}").ids.tolist()) - {-1})

    def call() -> None:
        if way == "update":
            index.update(ids, attributes={"turn": np.full(50, turn)})
        else:
            index.commit(compact=False)

    last = 0
    if way == "commit":
        index.update(ids, attributes={"turn": np.full(50, turn)})
    for _ in interrupts.every(call):
        if way == "commit":  # as the next process finds it
            index.close()
            index = ZoomIndex.open(place, writable=True)
        was_made = found(turn) == ids.tolist()
        assert was_made or (found(turn) == [] and set(ids) <= set(found(last)))
        assert len(index) == 300
        interrupts.settled(was_made)
        last, turn = turn if was_made else last, turn + 1
        if way == "commit":
            index.update(ids, attributes={"turn": np.full(50, turn)})
    index.close()


@contextmanager
def signal_at_pause(number: int) -> Iterator[list[int]]:
    """Send this thread a signal while a call is at a pause, counted from 1; yield the pauses that it comes to."""
    pauses: list[int] = []

    def hook() -> None:
        pauses.append(len(pauses) + 1)
        if len(pauses) == number:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            with suppress(KeyboardInterrupt):  # as soon as the call knows
                while True:
                    time.sleep(0.0001)
                    check_interrupt()

    context = pausing(hook)
    uninterrupted(context.__enter__)
    try:
        yield pauses
    finally:
        uninterrupted(lambda: context.__exit__(None, None, None))


@pytest.mark.parametrize("way", ["compact", "tune"])
def test_a_long_call_ends_soon_after_an_interrupt(indexed: Indexed, interrupts: Any, way: str) -> None:
    indexed.reopen()
    calls = {"compact": indexed.index.compact, "tune": lambda: indexed.index.tune(vectors_of(range(64), 1))}
    total, number = 2, 1
    while number < total:
        before = indexed.index.stats()
        with signal_at_pause(number) as pauses, pytest.raises(KeyboardInterrupt):
            calls[way]()
        assert len(pauses) == number, "it goes on, though it might end"
        after = indexed.index.stats()
        assert all(before[name] == after[name] for name in ("vectors", "lists", "parts", "file_bytes", "nprobe"))
        assert indexed.matches(indexed.model)
        interrupts.seen["points"] += 1
        number += 1 if interrupts.apart == 1 else 3 * interrupts.apart
        with signal_at_pause(0) as pauses:
            calls[way]()
        total = len(pauses)
    assert total > 3
    indexed.reopen()


@pytest.mark.long
def test_interrupted_searches_hold_nothing_up(indexed: Indexed, interrupts: Any) -> None:
    indexed.reopen()
    interrupts.roots += (str(Path(search.__file__).parent),)  # no other thread runs a search
    index, queries = indexed.index, vectors_of(range(64), 0)
    calls = [
        lambda: index.search(queries[:3], 5),
        lambda: index.range_search(queries[0], 3.0),
        lambda: [*index.search_iter(queries[0], 100)],
        lambda: index.explain(queries[0]),
        lambda: [index.reconstruct([1, 2]), 3 in index, index.stats(), index.memory_bytes, index.check()],
        lambda: index.tune(queries),
    ]
    for call in calls:
        for _ in interrupts.every(call):
            indexed.settle(indexed.model, interrupts)


def test_an_interrupted_close_or_opening_of_an_index(indexed: Indexed, interrupts: Any) -> None:
    indexed.reopen()

    def closed() -> None:
        indexed.index.close()

    for _ in interrupts.every(closed):
        indexed.reopen()
        interrupts.settled(was_made=True)

    def opened() -> None:
        indexed.index = ZoomIndex.open(indexed.place, writable=True)

    for _ in interrupts.every(opened):
        opened()
        indexed.reopen()
        indexed.index.close()
        interrupts.settled(was_made=False)


def test_an_interrupted_build_leaves_an_index_or_none(tmp_path: Path, interrupts: Any) -> None:
    vectors = vectors_of(range(64), 0)
    for point in range(0, 20_000, 500 * interrupts.apart + 77):

        def call() -> None:
            ZoomIndex.build(tmp_path / "index", vectors, dram="8MiB").close()

        was_struck = interrupts.strike(call, point)
        interrupts.seen["points"] += was_struck
        try:
            index = ZoomIndex.build(tmp_path / "index", vectors, dram="8MiB")
        except FileExistsError:
            index = ZoomIndex.open(tmp_path / "index")
        assert np.array_equal(index.reconstruct(range(64)), vectors)
        index.close()
        for file in sorted((tmp_path / "index").rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        (tmp_path / "index").rmdir()
        if not was_struck:
            break


@pytest.mark.parametrize("stored", [False, True])
def test_an_interrupted_decoder_answers_as_before(tmp_path: Path, interrupts: Any, stored: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 500)
    decoder = TopKSoftmax.from_linear(layer, k=5, contexts=torch.randn(600, 16))
    if stored:
        decoder.save(tmp_path / "d")
        decoder = TopKSoftmax.open(tmp_path / "d", dram="4MiB")
    hidden = torch.randn(4, 16)
    expected = decoder.topk(hidden)[1], decoder.log_prob(hidden, torch.arange(4))
    calls = [
        lambda: decoder.topk(hidden),
        lambda: decoder.certified_topk(hidden),
        lambda: decoder.log_prob(hidden, torch.arange(4)),
        lambda: decoder.log_partition(hidden),
        lambda: decoder.sample(hidden, top_k=3),
        lambda: decoder(hidden),
    ]
    if stored:
        calls.append(lambda: TopKSoftmax.open(tmp_path / "d", dram="4MiB"))
    for call in calls:
        for point in interrupts.every(call):
            interrupts.settled(was_made=False)
            if point % 5 == 0:
                assert torch.equal(decoder.topk(hidden)[1], expected[0])
                assert torch.equal(decoder.log_prob(hidden, torch.arange(4)), expected[1])


def test_an_interrupted_refresh_takes_the_layer_over_or_not(interrupts: Any) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 300) for _ in range(2)]
    hidden = torch.randn(8, 16)
    answers = [torch.topk(layer(hidden), 3).indices for layer in layers]
    decoder, now = TopKSoftmax.from_linear(layers[0], k=3, method="preview"), 0

    def call() -> None:
        decoder.refresh(layers[1 - now])

    for _ in interrupts.every(call):
        found = decoder.certified_topk(hidden, 3)[1]
        was_made = torch.equal(found, answers[1 - now])
        assert was_made or torch.equal(found, answers[now])
        interrupts.settled(was_made)
        now = 1 - now if was_made else now
