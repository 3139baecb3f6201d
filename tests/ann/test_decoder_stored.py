"""A layer whose rows lie on SSD answers as one in DRAM does, within its budget and with one submission a call."""

import copy
import os
import pickle
import re
import tracemalloc
from functools import partial

import numpy as np
import pytest

from memhier import backend
from memhier.ann.decoder import LogitIndex
from memhier.ann.decoder import index as index_module
from memhier.ann.decoder.core.verdicts import Rule
from memhier.ann.decoder.engine.draws import DrawRequest
from memhier.ann.decoder.engine.envelope import AS_IS
from memhier.ann.decoder.stored import open_index
from memhier.errors import BudgetError, ClosedError, CorruptionError

WORDS, DIMENSION = 4000, 256
# Of 4 MB of rows and 1 MB of codes; scans without the compiled core take more.
DRAM = 4_500_000 if backend.core else 6_000_000


def make_layer(dtype=np.float32):
    rng = np.random.default_rng(0)
    topics = rng.normal(size=(16, DIMENSION))
    weight = (rng.normal(size=(WORDS, 16)) @ topics * 0.3 + rng.normal(size=DIMENSION)).astype(dtype)
    bias = rng.normal(size=WORDS).astype(np.float32)
    hidden = (rng.normal(size=(1000, 16)) @ topics * 0.3 + rng.normal(size=(1000, DIMENSION)) * 0.05).astype(np.float32)
    return weight, bias, hidden


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    weight, bias, hidden = make_layer()
    index = LogitIndex.build(weight, bias, contexts=hidden[:800], k=5, method="graph")
    path = tmp_path_factory.mktemp("stored") / "index"
    index.save(path)
    return index, LogitIndex.open(path, dram=DRAM), hidden[800:], path


@pytest.mark.parametrize("method", ["graph", "screen", "preview", "full"])
def test_every_way_answers_as_in_dram(pair, method):
    index, stored, queries, _ = pair
    assert stored.layer is None
    for batch in (1, 7, 64):
        right, found = index.topk(queries[:batch], method=method), stored.topk(queries[:batch], method=method)
        np.testing.assert_array_equal(found.indices, right.indices)
        np.testing.assert_allclose(found.values, right.values, rtol=1e-5, atol=1e-5)


def test_one_submission_reads_each_row_of_a_batch_once(pair):
    _, stored, queries, _ = pair
    for _ in range(128):  # the preview, which reads more, answers 64 of these again
        stored.topk(queries[:1], method="graph")
    before = stored.stats()
    stored.topk(np.repeat(queries[:1], 16, axis=0), method="graph")
    after = stored.stats()
    assert 0 < after["pages"] - before["pages"] <= stored.settings.graph_limit


def test_certificates_hold(pair):
    index, stored, queries, path = pair
    right = index.logits(queries)
    found = stored.topk(queries, 5, certify=True)
    assert found.proven.mean() > 0.8
    order = np.argsort(-right, 1)[:, :5]
    for row in np.flatnonzero(found.proven):
        assert set(found.indices[row].tolist()) == set(order[row].tolist())
    engine = open_index(path, DRAM, "read")[0]
    few = engine.certify(queries, 5, 6)
    engine.close()
    for row in np.flatnonzero(few.proven):
        assert set(few.indices[row].tolist()) == set(order[row].tolist())
    assert few.proven.mean() < 0.9, "six rows alone cannot prove five of thousands"
    doubtful = np.concatenate([queries[:3], np.zeros((2, DIMENSION), np.float32)])
    complete = stored.topk(doubtful, 5, certify=True, complete=True)
    right = np.argsort(-index.logits(doubtful), 1, kind="stable")[:, :5]
    np.testing.assert_array_equal(complete.indices, right)


def test_log_z_and_its_bounds(pair):
    index, stored, queries, _ = pair
    logits = index.logits(queries).astype(np.float64)
    right = np.logaddexp.reduce(logits, axis=1)
    for temperature in (1.0, 3.0):
        right = np.logaddexp.reduce(logits / temperature, axis=1)
        z, in_dram = (each.partition(queries, temperature=temperature) for each in (stored, index))
        assert ((z.low <= right) & (right <= z.high)).all()
        np.testing.assert_allclose(z.estimate, in_dram.estimate, atol=1e-3)
    found = stored.log_prob(queries, np.arange(len(queries)))
    right = logits[np.arange(len(queries)), np.arange(len(queries))] - np.logaddexp.reduce(logits, axis=1)
    assert ((found.low <= right) & (right <= found.high)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_least_budget_holds_for_every_call(tmp_path, dtype):
    weight, bias, hidden = make_layer(dtype)
    weight, bias = np.concatenate([weight] * 2), np.concatenate([bias] * 2)
    LogitIndex.build(weight, bias, contexts=hidden[:800], k=5, method="graph").save(tmp_path / "index")
    with pytest.raises(BudgetError, match="dram=1000 B: codes, graph") as refused:
        LogitIndex.open(tmp_path / "index", dram=1000)
    least = int(re.findall(r"(\d+) bytes are enough", str(refused.value))[0])
    with pytest.raises(BudgetError, match=f"{least} bytes are enough"):
        LogitIndex.open(tmp_path / "index", dram=least - 1)
    queries, targets = hidden[800:840], np.arange(40)
    request = DrawRequest(Rule(0.9), 1.0, AS_IS, np.array([[5, 3], [50, 30]]), np.arange(8, dtype=np.uint64))
    # Opened once before, so that the memory that libraries keep does not count.
    LogitIndex.open(tmp_path / "index", dram=least).close()
    tracemalloc.start()
    try:
        engine, *rest = open_index(tmp_path / "index", least, "read")
        stored = LogitIndex(engine, *rest)
        assert stored.layer is None
        for ask in (
            *(partial(stored.topk, queries, method=method) for method in ("graph", "screen", "preview", "full")),
            partial(stored.topk, queries, certify=True, complete=True),
            partial(stored.partition, queries),
            partial(stored.distribution, queries),
            partial(stored.log_prob, queries, targets),
            partial(stored.log_prob, queries, targets, exact=True),
            partial(stored.envelope, queries[:8], 5),
            partial(stored.draw, queries[:8], request),
        ):
            ask()
            assert stored.memory_bytes <= least
            # NumPy's arrays at most, and all that the core, the store and the reader hold besides.
            arrays = engine.codes.memory_bytes + engine.rows.bias.nbytes
            held = engine.memory_bytes if backend.core else engine.codes.memory_bytes + engine.rows.memory_bytes
            assert tracemalloc.get_traced_memory()[1] + held - arrays <= least, ask
    finally:
        tracemalloc.stop()


def test_a_budget_that_holds_the_rows_takes_them(tmp_path):
    weight, bias, hidden = make_layer()
    index = LogitIndex.build(weight, bias, contexts=hidden[:800], k=5, method="preview")
    index.save(tmp_path / "index")
    whole = LogitIndex.open(tmp_path / "index")
    whole.topk(hidden, certify=True)
    budget = whole.memory_bytes + (2**20 if backend.core else 2**22)
    in_dram = LogitIndex.open(tmp_path / "index", dram=budget)
    np.testing.assert_array_equal(in_dram.layer.weight, weight)
    in_dram.topk(hidden, certify=True)
    assert in_dram.memory_bytes <= budget


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_build_may_go_straight_to_ssd(tmp_path, dtype):
    weight, bias, hidden = make_layer(dtype)
    index = LogitIndex.build(
        weight,
        bias,
        contexts=hidden[:800],
        k=5,
        method="preview",
        dram=3_300_000 if backend.core else 5_200_000,
        path=tmp_path / "index",
    )
    # Without the compiled core, rows of two bytes take less than their reader.
    assert (index.layer is None) == bool(backend.core or dtype == np.float32)
    right = np.argsort(-(hidden[800:820] @ weight.astype(np.float32).T + bias), 1)[:, :5]
    assert (index.topk(hidden[800:820]).indices == right).mean() > 0.98
    index.close()
    if index.layer is None:
        with pytest.raises(ClosedError):
            index.topk(hidden[:1])
    with pytest.raises(ValueError, match="dram='3MB', path=None: expected both, or neither"):
        LogitIndex.build(weight, bias, dram="3MB")
    with pytest.raises(BudgetError, match="codes, graph, checksums and buffers take more"):
        LogitIndex.build(weight, bias, contexts=hidden, k=5, method="preview", dram=1000, path=tmp_path / "other")


def test_a_place_that_is_taken_is_refused_before_anything_is_built(tmp_path, monkeypatch):
    weight, bias, hidden = make_layer()
    monkeypatch.setattr(index_module, "build_codes", lambda *_: pytest.fail("it was built"))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("a user's")
    with pytest.raises(FileExistsError):
        LogitIndex.build(weight, bias, contexts=hidden, dram="3MB", path=tmp_path / "taken")
    with pytest.raises(FileNotFoundError):
        LogitIndex.build(weight, bias, contexts=hidden, dram="3MB", path=tmp_path / "nowhere" / "index")
    assert [each.name for each in tmp_path.iterdir()] == ["taken"]


def test_a_page_that_changed_is_noticed_when_it_is_read(tmp_path):
    weight, bias, hidden = make_layer()
    LogitIndex.build(weight, bias, contexts=hidden[:800], k=5, method="preview").save(tmp_path / "index")
    index = LogitIndex.open(tmp_path / "index", dram=DRAM)
    file = max((tmp_path / "index" / "segments").iterdir(), key=lambda each: each.stat().st_size)
    data = bytearray(file.read_bytes())
    for page in range(0, len(data), 4096):
        data[page + 7] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptionError):
        index.topk(hidden[:1])


def test_copies_pickles_and_children(tmp_path):
    weight, bias, hidden = make_layer()
    index = LogitIndex.build(weight, bias, contexts=hidden[:800], k=5, method="preview", dram=DRAM, path=tmp_path / "a")
    right = index.topk(hidden[:5]).indices
    np.testing.assert_array_equal(copy.deepcopy(index).topk(hidden[:5]).indices, right)
    with pytest.raises(TypeError, match="rows lie on SSD cannot be pickled"):
        pickle.dumps(index)
    child = os.fork()
    if not child:
        os._exit(int((index.topk(hidden[:5]).indices != right).any()))
    assert os.waitpid(child, 0)[1] == 0
    np.testing.assert_array_equal(index.topk(hidden[:5]).indices, right)
    # Refreshed, it answers from the layer it was given, and lets go of its files.
    assert index.refresh(weight * 2, bias) == WORDS
    assert index.layer is not None
    index.close()
    assert (index.topk(hidden[:5], certify=True, complete=True).values > 0).any()


def test_a_memory_map_is_indexed_as_an_array_is(tmp_path):
    weight, bias, hidden = make_layer()
    np.save(tmp_path / "weight.npy", weight)
    mapped = np.load(tmp_path / "weight.npy", mmap_mode="r")
    index = LogitIndex.build(mapped, bias, contexts=hidden[:800], k=5, method="graph", dram=DRAM, path=tmp_path / "a")
    right = LogitIndex.build(weight, bias, contexts=hidden[:800], k=5, method="graph")
    np.testing.assert_array_equal(index.topk(hidden[800:900]).indices, right.topk(hidden[800:900]).indices)
    assert index.digest == right.digest


def test_many_states_are_answered_in_parts_of_bounded_size(pair):
    _, stored, queries, path = pair
    states = np.concatenate([queries] * 2)

    def ask(index, states):
        z, proof = index.partition(states), index.topk(states, 5, certify=True)
        top, walked = index.topk(states, method="preview"), index.topk(states, method="graph")
        return z.estimate, z.low, z.high, proof.values, proof.proven.astype(int), top.values, walked.values

    engine, *rest = open_index(path, DRAM, "read")
    engine.rows.limit_scratch(4 << 20)
    tracemalloc.start()
    try:
        parts = ask(LogitIndex(engine, *rest), states)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    engine.close()
    assert peak < 64 << 20, "certificates alone look at 800 MB of rows"
    for found, right in zip(parts, ask(stored, states), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)
    # A state alone is one part.
    singles = [ask(stored, state[None]) for state in states[::25]]
    for found, right in zip(parts, zip(*singles, strict=True), strict=True):
        np.testing.assert_allclose(found[::25], np.concatenate(right), rtol=1e-5, atol=1e-5)


def test_a_failed_open_closes_its_files(tmp_path):
    weight, bias, hidden = make_layer()
    LogitIndex.build(weight, bias, contexts=hidden[:800], k=5, method="preview").save(tmp_path / "index")
    file = max((tmp_path / "index" / "segments").iterdir(), key=lambda each: each.stat().st_size)
    data = bytearray(file.read_bytes())
    data[4096 * 5] ^= 1
    file.write_bytes(data)

    def held():
        links = (os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
        return [link for link in links if str(tmp_path) in link]

    with pytest.raises(CorruptionError) as caught:
        LogitIndex.open(tmp_path / "index")
    # The error keeps all frames alive, and so the one file that was being read; the store's own are closed.
    assert all("weight" in link for link in held()), caught
