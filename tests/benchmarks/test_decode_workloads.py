"""Parts of the decoder's workloads: the clock, precision, and indexes that are kept."""

from itertools import groupby

import faiss
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from memhier.benchmarks.workloads.decode.clock import OtherWork, Way, measure, precision  # noqa: E402
from memhier.benchmarks.workloads.decode.kept import kept_index  # noqa: E402
from memhier.benchmarks.workloads.decode.layers import TrainedLayer  # noqa: E402


def test_precision_counts_words_whatever_their_order():
    assert precision(np.array([[1, 2, 3], [4, 5, 6]]), np.array([[3, 2, 9], [6, 5, 4]])) == pytest.approx(5 / 6)


def test_every_way_is_asked_alike():
    asked = np.arange(40, dtype=np.float32).reshape(20, 2)
    seen = {"a": [], "b": []}
    ways = [Way(name, "", lambda states, name=name: seen[name].append(states.copy())) for name in seen]
    taken = measure(ways, asked, 3, 5)
    for times in (taken.cold, taken.warm):
        assert {name: len(each) for name, each in times.items()} == {"a": 5, "b": 5}
    assert taken.medians()[0].keys() == taken.medians()[1].keys() == {"a", "b"}
    assert all(states.shape == (3, 2) for states in seen["a"])
    np.testing.assert_array_equal(seen["a"][0], seen["b"][0])


def test_before_each_cold_call_of_every_way_other_memory_is_touched(monkeypatch):
    order = []
    monkeypatch.setattr(OtherWork, "__call__", lambda _: order.append("other"))
    ways = [Way(name, "", lambda _, name=name: order.append(name)) for name in "ab"]
    measure(ways, np.zeros((20, 2), np.float32), 3, 12)
    groups = [(name, len(list(calls))) for name, calls in groupby(order)]
    names = [name for name, _ in groups]
    assert names[::2] == ["other"] * 24
    rounds = ["".join(pair) for pair in zip(names[1::4], names[3::4], strict=True)]
    assert set(rounds) == {"ab", "ba"}, "no way always comes after the same other"
    assert all(calls == 1 if name == "other" else calls > 1 for name, calls in groups)


def test_an_index_is_built_once_for_a_layer(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    layer = TrainedLayer(rows, rows[:, 0].copy(), rows, rows)
    built = []

    def build():
        built.append(1)
        index = faiss.IndexFlatL2(4)
        index.add(rows)
        return index

    first, seconds = kept_index(layer, "flat", build)
    again, kept_seconds = kept_index(layer, "flat", build)
    assert len(built) == 1
    assert seconds == kept_seconds
    np.testing.assert_array_equal(first.search(rows, 3)[1], again.search(rows, 3)[1])
    kept_index(layer, "flat, otherwise", build)
    kept_index(TrainedLayer(rows + 1, layer.bias, rows, rows), "flat", build)
    assert len(built) == 3
