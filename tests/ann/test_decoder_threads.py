"""Threads over one index: every call answers as it does alone. Small, since a core that looks for races runs it too."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from memhier.ann.decoder import LogitIndex

THREADS, CALLS = 4, 3


@pytest.fixture(scope="module")
def layer():
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(2000, 512)).astype(np.float32)
    hidden = (rng.normal(size=(250, 512)) * 4 / np.arange(1, 513)).astype(np.float32)
    return weight, hidden


@pytest.fixture(scope="module", params=["in DRAM", "on SSD"])
def index(request, layer, tmp_path_factory):
    weight, hidden = layer
    built = LogitIndex.build(weight, contexts=hidden[:200], k=5, method="graph", rank=12)
    if request.param == "in DRAM":
        return built
    path = tmp_path_factory.mktemp("threads") / "index"
    built.save(path)
    return LogitIndex.open(path, dram=4_050_000)  # the rows alone take more


def ask(index, states):
    """Answers of every kind, as plain arrays."""
    proof, z = index.topk(states, certify=True), index.partition(states)
    ways = [index.topk(states, method=method).indices for method in ("graph", "screen", "preview", "full")]
    return [*ways, proof.indices, proof.proven, z.estimate, z.low, z.high]


@pytest.mark.long
def test_calls_from_several_threads_answer_as_one_after_the_other(index, layer):
    pieces = [layer[1][at : at + size] for at, size in ((200, 1), (203, 5), (210, 16), (230, 9))]
    right = [ask(index, states) for states in pieces]
    with ThreadPoolExecutor(THREADS) as pool:
        calls = [
            (turn % len(pieces), pool.submit(ask, index, pieces[turn % len(pieces)])) for turn in range(THREADS * CALLS)
        ]
        for place, call in calls:
            for found, wanted in zip(call.result(), right[place], strict=True):
                np.testing.assert_array_equal(found, wanted)


def test_a_workspace_is_made_for_each_call_at_a_time_and_kept(layer):
    weight, hidden = layer
    index = LogitIndex.build(weight, contexts=hidden[:200], k=5, method="graph", rank=12)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda _: ask(index, hidden[200:206]), range(THREADS * CALLS)))
    held = index.memory_bytes
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda _: ask(index, hidden[200:206]), range(THREADS * CALLS)))
    assert index.memory_bytes <= held * 1.5
