"""LogitIndex against the full product: every way, odd sizes, certificates, log Z, files, faults."""

import pickle

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memhier import backend
from memhier.ann.decoder import LogitIndex
from memhier.ann.decoder.calibration import build, calibrate
from memhier.ann.decoder.coding import codes
from memhier.ann.decoder.coding.tail import margins
from memhier.ann.decoder.engine import dram_engine
from memhier.ann.decoder.layer import OutputLayer, as_floats, check_layer
from memhier.ann.decoder.stored import open_index
from memhier.errors import BudgetError, CorruptionError, FormatError


def make_layer(words, dimension, seed=0):
    """A layer and contexts with a few strong directions, as models have."""
    rng = np.random.default_rng(seed)
    strength = 1 / np.arange(1, dimension + 1)
    weight = (rng.normal(size=(words, dimension)) + rng.normal(size=dimension)).astype(np.float32)
    hidden = (rng.normal(size=(400, dimension)) * strength * 4 + rng.normal(size=dimension) * 0.3).astype(np.float32)
    bias = rng.normal(size=words).astype(np.float32)
    return weight, bias, hidden


def make_engine(weight, bias, contexts, **options):
    """The engine that an index of this layer answers by, and its settings."""
    layer = check_layer(weight, bias, None)
    made, measured, _ = build.build_codes(layer, contexts, build.BuildOptions(**options))
    return dram_engine.DramEngine(made, layer), measured


def exact(weight, bias, hidden):
    return hidden.astype(np.float64) @ weight.astype(np.float64).T + bias.astype(np.float64)


def assert_largest(found, logits, k):
    """Values are exact logits of the named words, and no word left out has a larger one."""
    rows = np.arange(len(logits))[:, None]
    np.testing.assert_allclose(found.values, logits[rows, found.indices], rtol=1e-4, atol=1e-4)
    kth = np.sort(logits, 1)[:, -k]
    assert (found.values[:, -1] >= kth - 1e-4 * np.maximum(1, np.abs(kth))).all()
    assert all(len(set(row)) == k for row in found.indices.tolist())


@pytest.fixture(params=["native", "python"])
def core(request, monkeypatch):
    """Both cores, by turns."""
    if request.param == "python":
        monkeypatch.setattr(backend, "core", None)
    elif backend.core is None:
        pytest.skip("needs the compiled core")


@pytest.mark.parametrize(("words", "dimension"), [(1, 1), (3, 3), (97, 5), (300, 97), (1000, 64)])
def test_certified_and_completed_answers_are_those_of_the_full_product(core, words, dimension):
    weight, bias, hidden = make_layer(words, dimension)
    index = LogitIndex.build(
        weight, bias, contexts=hidden[:300], k=min(5, words), rank=max(1, dimension // 3), method="preview"
    )
    queries = hidden[300:337]
    for k in {1, min(5, words), words}:
        found = index.topk(queries, k, certify=True, complete=True)
        assert_largest(found, exact(weight, bias, queries), k)


@pytest.mark.filterwarnings("ignore:.*hidden states are unlike the contexts")
@settings(max_examples=40, deadline=None)
@given(
    words=st.integers(1, 600),
    dimension=st.sampled_from([1, 2, 3, 8, 17, 33]),
    rank=st.integers(1, 33),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([1e-6, 1.0, 1e4]),
    far=st.booleans(),
)
@example(words=1, dimension=33, rank=1, seed=3149, scale=1e4, far=False)  # large terms cancel: no word may seem lost
def test_proven_answers_are_right(words, dimension, rank, seed, scale, far):
    weight, bias, hidden = make_layer(words, dimension, seed)
    weight *= np.float32(scale)
    k = min(words, 4)
    index = LogitIndex.build(weight, bias, contexts=hidden[:200], k=k, rank=min(rank, dimension), method="preview")
    # Contexts that the build never saw, some far away: bounds hold for any.
    queries = hidden[200:216] * np.float32(30 if far else 1) + np.float32(far)
    logits = exact(weight, bias, queries)
    found = index.topk(queries, k, certify=True)
    order = np.argsort(-logits, 1, kind="stable")[:, :k]
    for row in np.flatnonzero(found.proven):
        assert set(found.indices[row].tolist()) == set(order[row].tolist())
    z = index.partition(queries)
    largest = logits.max(1)
    right = largest + np.log(np.exp(logits - largest[:, None]).sum(1))
    assert (z.low <= right).all()
    assert (right <= z.high).all()
    assert ((z.low <= z.estimate) & (z.estimate <= z.high)).all()


@pytest.mark.parametrize("rank", [4, 16, 24])
@pytest.mark.parametrize("giant", [1, 300])
def test_bounds_hold_for_every_row(core, rank, giant):
    weight, bias, hidden = make_layer(600, 24)
    weight[:, 0] *= giant  # codes then keep little of the other directions
    engine, _ = make_engine(weight, bias, hidden[:300], k=5, rank=rank, method="preview")
    queries = np.concatenate([hidden[300:340], hidden[300:320] * 20])
    rows, keys, left = np.empty((60, 600), np.int64), np.empty((60, 600, 2), np.float32), np.empty(60, np.float32)
    engine.codes.core(None).candidates(hidden=queries, coarse=(0, 0), rows=rows, keys=keys, left=left, bounds=True)
    upper, estimates = keys[:, :, 0].astype(np.float64), keys[:, :, 1].astype(np.float64)
    logits = np.take_along_axis(exact(weight, bias, queries), rows, 1)
    assert (logits <= upper).all()
    assert (logits >= 2 * estimates - upper).all()
    around, _ = margins(engine.codes, queries, rows)
    np.testing.assert_allclose(around, upper - estimates, rtol=2e-2, atol=1e-4 * np.abs(estimates).max())


def test_no_row_beyond_the_last_is_a_candidate(core):
    weight, states = np.zeros((3, 8), np.float32), np.full((2, 8), 1e15, np.float32)
    weight[2] = -1e15  # its logit is below that of the rows that pad a chunk
    engine, _ = make_engine(weight, np.zeros(3, np.float32), None, k=2)
    rows, keys, left = np.empty((2, 3), np.int64), np.empty((2, 3, 2), np.float32), np.empty(2, np.float32)
    engine.codes.core(None).candidates(hidden=states, coarse=(0, 0), rows=rows, keys=keys, left=left)
    np.testing.assert_array_equal(np.sort(rows, 1), [[0, 1, 2]] * 2)


def test_rows_not_ranked_keep_an_answer_from_being_proven(core):
    weight, bias, hidden = make_layer(600, 24)
    engine, _ = make_engine(weight, bias, hidden[:300], k=5, rank=4, method="preview")
    order = np.argsort(-exact(weight, bias, hidden[300:]), 1)[:, :5]
    found = engine.certify(hidden[300:], 5, 6)
    for row in np.flatnonzero(found.proven):
        assert set(found.indices[row].tolist()) == set(order[row].tolist())
    assert found.proven.mean() < 0.5, "six rows alone cannot prove five of hundreds"


@pytest.mark.parametrize("scale", [1, 1e-23, 1e-26])
def test_small_states_whose_squares_vanish_prove_nothing_wrong(core, scale):
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(300, 64)).astype(np.float32)
    across, _ = np.linalg.qr(hidden[:4].T)
    weight = rng.normal(size=(500, 64))
    weight = (weight - weight @ across @ across.T).astype(np.float32)  # logits are the noise of rounding
    index = LogitIndex.build(weight, None, contexts=hidden[4:], k=5, method="preview")
    states = (scale * hidden[:4]).astype(np.float32)
    right = np.sort(np.argsort(-exact(weight, np.zeros(500), states), 1)[:, :5], 1)
    whole = index.proven_of(states, states @ weight.T, 5)
    for found in (index.topk(states, 5, certify=True, complete=False), whole):
        assert (np.sort(found.indices, 1) == right)[found.proven].all()


def test_products_that_vanish_beside_biases_prove_nothing_wrong(core):
    weight, bias = np.zeros((600, 64), np.float32), np.zeros(600, np.float32)
    weight[0], bias[1] = 2.6e-23, 7e-45  # each product of row 0 is half of the least number
    states = np.full((2, 64), 2.6e-23, np.float32)
    index = LogitIndex.build(weight, bias, k=1, method="preview")
    for found in (index.topk(states, 1, certify=True), index.proven_of(states, states @ weight.T + bias, 1)):
        assert ((found.indices[:, 0] == 0) | ~found.proven).all()


def test_logits_that_float16_rounds_to_the_same_number_near_zero_are_not_proven(core):
    rng = np.random.default_rng(0)
    weight = (rng.normal(size=(600, 64)) * 1e-3).astype(np.float16)
    hidden = (rng.normal(size=(400, 64)) * 1e-3).astype(np.float16).astype(np.float32)
    index = LogitIndex.build(weight, k=1, method="preview")
    rounded = index.logits(hidden).astype(np.float16).astype(np.float32)
    order = -np.sort(-rounded, 1)
    for found in (index.topk(hidden, 1, certify=True), index.proven_of(hidden, rounded, 1)):
        assert (order[:, 0] > order[:, 1])[found.proven].all()
        assert found.proven.mean() > 0.5


@pytest.mark.parametrize("order", ["any", "falling", "rising", "equal"])
@pytest.mark.parametrize(("words", "k"), [(1, 1), (2, 2), (15, 3), (16, 16), (1001, 1), (1001, 10), (700, 400)])
def test_of_a_product_the_largest_are_found_and_proven_but_for_ties(core, words, k, order):
    weight, bias, hidden = make_layer(words, 24)
    if order == "equal":
        weight[:], bias[:] = weight[0], bias[0]
    elif order != "any":  # as words by their frequency
        weight[:], bias = 0, np.sort(bias)[:: -1 if order == "falling" else 1].copy()
    index = LogitIndex.build(weight, bias, method="preview", k=min(5, words))
    found = index.proven_of(hidden[:20], hidden[:20] @ weight.T + bias, k)
    assert_largest(found, exact(weight, bias, hidden[:20]), k)
    assert (np.diff(found.values) <= 0).all()
    if order == "equal":
        np.testing.assert_array_equal(found.indices, [np.arange(k)] * 20)
    assert (found.proven == (order != "equal" or k == words)).mean() >= 0.9, "other logits may be as near"
    with pytest.raises(ValueError, match="expected finite numbers"):
        index.proven_of(np.full_like(hidden[:1], np.nan), np.zeros((1, words), np.float32), k)


@pytest.mark.parametrize("numbers", [[], [4.0], [4.0, 2.0, 3.0], [np.inf, 5.0, -np.inf], [np.inf] * 3 + [1.0]])
@pytest.mark.parametrize("rest", [-np.inf, np.nan])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_of_logits_that_are_not_finite_the_answer_holds_each_word_once_and_no_proof(core, numbers, rest, dtype):
    weight, bias, hidden = make_layer(600, 24)
    index = LogitIndex.build(weight.astype(dtype), bias, method="preview")
    logits = np.full((1, 600), rest, np.float32)  # as of a layer of float16 whose logits are beyond 65504
    logits[0, 7 : 7 + len(numbers)] = numbers
    found = index.proven_of(hidden[:1], logits, 3)
    best = np.argsort(-np.where(logits[0] > -np.inf, logits[0], -np.inf), kind="stable")[:3]
    np.testing.assert_array_equal(np.sort(found.indices[0]), np.sort(best))
    assert not found.proven.any()


def test_most_answers_are_proven_and_most_rows_are_not_looked_at():
    weight, bias, hidden = make_layer(5000, 64)
    index = LogitIndex.build(weight, bias, contexts=hidden[:300], k=5, rank=32, method="preview")
    assert index.topk(hidden[300:], 5, certify=True).proven.mean() > 0.9


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_of_every_type(core, dtype):
    weight, bias, hidden = make_layer(500, 24)
    halved = (weight.view(np.uint32) >> 16).astype(np.uint16)
    stored = halved if dtype == "bfloat16" else weight.astype(dtype)
    index = LogitIndex.build(stored, bias, dtype=dtype, contexts=hidden[:300], k=5, method="preview")
    rounded = as_floats(stored, dtype)
    assert_largest(index.topk(hidden[300:], certify=True, complete=True), exact(rounded, bias, hidden[300:]), 5)


def test_the_two_cores_agree(monkeypatch):
    if backend.core is None:
        pytest.skip("needs the compiled core")
    weight, bias, hidden = make_layer(700, 40)
    answers = []
    for _ in range(2):
        index = LogitIndex.build(weight, bias, contexts=hidden[:300], k=7, rank=12, method="preview")
        answers.append(
            (index.topk(hidden[300:]), index.topk(hidden[300:], certify=True), index.partition(hidden[300:]))
        )
        monkeypatch.setattr(backend, "core", None)
    (native, proof, z), (python, python_proof, python_z) = answers
    np.testing.assert_array_equal(native.indices, python.indices)
    np.testing.assert_allclose(native.values, python.values, rtol=1e-5)
    np.testing.assert_array_equal(proof.indices, python_proof.indices)
    assert (proof.proven == python_proof.proven).mean() > 0.95
    np.testing.assert_allclose(z.estimate, python_z.estimate, atol=1e-4)
    # The compiled core takes the head out of a sum of all rows, which costs its bounds a little.
    assert (python_z.high <= z.high + 1e-3).all()
    np.testing.assert_allclose(z.high, python_z.high, atol=0.5)


def test_log_prob_and_its_bounds():
    weight, bias, hidden = make_layer(2000, 32)
    index = LogitIndex.build(weight, bias, contexts=hidden[:300], k=5, method="preview")
    logits = exact(weight, bias, hidden[300:])
    targets = np.random.default_rng(1).integers(0, 2000, 100)
    right = logits[np.arange(100), targets] - np.log(np.exp(logits).sum(1))
    found = index.log_prob(hidden[300:], targets)
    assert ((found.low <= right) & (right <= found.high)).all()
    assert np.abs(found.estimate - right).mean() < 2e-3


def test_temperature_divides_logits_in_log_z():
    weight, bias, hidden = make_layer(500, 16)
    index = LogitIndex.build(weight, bias, contexts=hidden[:300], k=5, rank=8, method="preview")
    logits = exact(weight, bias, hidden[300:310]) / 2.5
    z = index.partition(hidden[300:310], temperature=2.5)
    right = np.log(np.exp(logits).sum(1))
    assert ((z.low <= right) & (right <= z.high)).all()
    np.testing.assert_allclose(z.estimate, right, atol=0.05)


@pytest.mark.parametrize(
    "spoil",
    ["duplicates", "zeros", "giant", "constant", "no bias", "all equal"],
)
def test_hard_layers_are_answered_right(core, spoil):
    weight, bias, hidden = make_layer(400, 16)
    if spoil == "duplicates":
        weight[200:] = weight[:200]
        bias[200:] = bias[:200]
    elif spoil == "zeros":
        weight[::3] = 0
    elif spoil == "giant":
        weight[7] *= 1e4
    elif spoil == "constant":
        bias[:] = 1e3
    elif spoil == "no bias":
        bias[:] = 0
    else:
        weight[:], bias[:] = 1, 0
    index = LogitIndex.build(weight, None if spoil == "no bias" else bias, contexts=hidden[:300], k=5, method="preview")
    queries, logits = hidden[300:], exact(weight, bias, hidden[300:])
    found = index.topk(queries, certify=True, complete=True)
    assert_largest(found, logits, 5)
    kth = np.sort(logits, 1)[:, -5]
    plain = index.topk(queries, method="preview")
    assert (plain.values >= kth[:, None] - 1e-3 * np.abs(kth[:, None])).mean() > 0.98


def test_without_contexts_every_direction_is_coded():
    weight, bias, hidden = make_layer(600, 20)
    index = LogitIndex.build(weight, bias, k=5)
    assert_largest(index.topk(hidden[:50]), exact(weight, bias, hidden[:50]), 5)


def test_inputs_of_any_layout():
    weight, bias, hidden = make_layer(300, 12)
    index = LogitIndex.build(weight, bias, contexts=hidden, k=3, method="preview")
    strided = np.asfortranarray(hidden[:10])
    np.testing.assert_array_equal(index.topk(strided).indices, index.topk(hidden[:10]).indices)
    np.testing.assert_array_equal(index.topk(hidden[4]).indices, index.topk(hidden[4:5]).indices)
    assert index.topk(hidden[:0]).indices.shape == (0, 3)
    assert index.partition(hidden[:0]).estimate.shape == (0,)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"weight": np.zeros((3, 4), np.int32)}, TypeError, "weight: expected float32"),
        ({"weight": np.zeros(3, np.float32)}, ValueError, r"weight: expected shape \[V, D\]"),
        ({"weight": np.full((300, 12), np.nan, np.float32)}, ValueError, r"weight\[0\] holds NaN"),
        ({"bias": np.zeros(3)}, ValueError, r"bias: expected shape \[300\]"),
        ({"bias": np.full(300, np.inf)}, ValueError, r"bias\[0\]=inf"),
        ({"k": 301}, ValueError, "k=301: expected 1 to 300 words"),
        ({"k": 0}, ValueError, "k=0"),
        ({"precision": 1.5}, ValueError, "precision=1.5"),
        ({"method": "best"}, ValueError, "method='best'"),
        ({"rank": 13}, ValueError, "rank=13: expected 1 to 12"),
        ({"contexts": np.zeros((5, 12), np.float32)}, ValueError, "contexts has 5 rows"),
        ({"contexts": np.full((100, 12), np.nan, np.float32)}, ValueError, r"contexts\[0\] holds NaN"),
        ({"contexts": np.zeros((100, 11), np.float32)}, ValueError, r"contexts: expected shape \[n, 12\]"),
        ({"contexts": None, "method": "graph"}, ValueError, "contexts=None: method='graph' learns from"),
    ],
)
def test_bad_builds_name_the_argument(change, error, words):
    weight, bias, hidden = make_layer(300, 12)
    arguments = {"weight": weight, "bias": bias, "contexts": hidden, "k": 5} | change
    with pytest.raises(error, match=words):
        LogitIndex.build(**arguments)


def test_bad_calls_name_the_argument(core):
    weight, bias, hidden = make_layer(300, 12)
    index = LogitIndex.build(weight, bias, contexts=hidden, k=3, method="preview")
    bad = hidden[:4].copy()
    bad[2, 5] = np.nan
    for call in (index.topk, index.partition, index.logits, lambda h: index.topk(h, certify=True)):
        with pytest.raises(ValueError, match=r"hidden\[2, 5\]=nan: expected finite"):
            call(bad)
    with pytest.raises(ValueError, match=r"hidden: expected shape \[n, 12\]"):
        index.topk(hidden[:, :11])
    with pytest.raises(TypeError, match="hidden: expected an array of float"):
        index.topk(np.zeros((2, 12), int))
    with pytest.raises(ValueError, match="k=301: expected 1 to 300"):
        index.topk(hidden[:2], 301)
    with pytest.raises(ValueError, match="targets: expected 0 to 299"):
        index.log_prob(hidden[:2], [0, 300])
    with pytest.raises(ValueError, match=r"targets: expected integers \[2\]"):
        index.log_prob(hidden[:2], [0])
    with pytest.raises(ValueError, match="temperature=0"):
        index.partition(hidden[:2], temperature=0)


@pytest.mark.long
def test_a_saved_index_answers_alike(core, tmp_path):
    weight, bias, hidden = make_layer(5000, 512)
    index = LogitIndex.build(weight, bias, contexts=hidden[:300], k=5, method="preview", rank=64)
    index.save(tmp_path / "index")
    again = LogitIndex.open(tmp_path / "index")
    np.testing.assert_array_equal(again.topk(hidden[300:]).indices, index.topk(hidden[300:]).indices)
    assert not again.is_stale(weight, bias)
    stored = LogitIndex.open(tmp_path / "index", dram=7_000_000)
    assert stored.layer is None
    assert stored.memory_bytes <= 7_000_000
    logits = exact(weight, bias, hidden[300:])
    assert_largest(stored.topk(hidden[300:], certify=True, complete=True), logits, 5)
    np.testing.assert_allclose(stored.logits(hidden[300:]), logits, atol=1e-4)
    stored.close()
    stored.close()
    with pytest.raises(BudgetError, match="buffers take more"):
        LogitIndex.open(tmp_path / "index", dram="10KiB")


def test_damage_is_noticed(tmp_path):
    weight, bias, hidden = make_layer(300, 12)
    index = LogitIndex.build(weight, bias, contexts=hidden, k=3, method="preview")
    index.save(tmp_path / "index")
    with pytest.raises(FileExistsError):
        index.save(tmp_path / "index")
    with pytest.raises(FileNotFoundError):
        LogitIndex.open(tmp_path / "nothing")
    for segment in sorted((tmp_path / "index" / "segments").iterdir()):
        bytes_ = segment.read_bytes()
        segment.write_bytes(bytes_[:10] + bytes([bytes_[10] ^ 1]) + bytes_[11:])
        with pytest.raises((CorruptionError, FormatError)):
            LogitIndex.open(tmp_path / "index")
        segment.write_bytes(bytes_)
    LogitIndex.open(tmp_path / "index")


def test_a_layer_that_was_trained_on_is_stale_until_refreshed():
    weight, bias, hidden = make_layer(1000, 24)
    index = LogitIndex.build(weight.copy(), bias, contexts=hidden[:300], k=5, method="preview")
    tuned = weight.copy()
    tuned[100:130] += 0.5
    assert index.is_stale(tuned, bias)
    assert index.refresh(tuned, bias) >= 30
    assert not index.is_stale(tuned, bias)
    assert_largest(index.topk(hidden[300:], certify=True, complete=True), exact(tuned, bias, hidden[300:]), 5)
    with pytest.raises(ValueError, match=r"expected shape \[1000, 24\]"):
        index.refresh(tuned[:500], bias[:500])


def test_auto_takes_a_way_for_every_batch():
    weight, bias, hidden = make_layer(2000, 32)
    index = LogitIndex.build(weight, bias, contexts=hidden[:300], k=5)
    assert index.settings.choices[0][0] == 1
    for batch in (1, 3, 8, 97):
        assert index.way(batch) in ("full", "preview", "graph", "screen")
        assert index.topk(hidden[:batch]).indices.shape == (batch, 5)


def test_numbers_that_do_not_fit_are_named():
    weight, _, hidden = make_layer(300, 12)
    with pytest.raises(ValueError, match=r"weight\[0\] holds NaN or infinity"):
        LogitIndex.build(weight.astype(np.float64) * 1e300)
    large = weight.copy()
    large[7, 3] = 1e16
    with pytest.raises(ValueError, match=r"weight\[7\] holds a number beyond 1e\+15"):
        LogitIndex.build(large)
    with pytest.raises(ValueError, match="seed=-1"):
        LogitIndex.build(weight, seed=-1)
    index = LogitIndex.build(weight, contexts=hidden, method="preview")
    with pytest.raises(ValueError, match="method='other': expected one of auto, graph"):
        index.topk(hidden[:1], method="other")


def test_the_full_product_of_many_states_is_made_in_parts(monkeypatch):
    weight, bias, hidden = make_layer(500, 16)
    index = LogitIndex.build(weight, bias, contexts=hidden[:300], k=5, method="full")
    right = index.topk(hidden[:100])
    monkeypatch.setattr(dram_engine, "LOGITS_MOST", 1600)
    parts = index.topk(hidden[:100])
    np.testing.assert_array_equal(parts.indices, right.indices)
    assert_largest(parts, exact(weight, bias, hidden[:100]), 5)


@pytest.mark.parametrize(("share", "chosen"), [(0.5, "preview"), (0.95, "full"), (1.4, "full"), (5.0, "full")])
def test_auto_leaves_the_full_product_only_for_a_clearly_faster_way(monkeypatch, share, chosen):
    clock = [0.0]
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: clock[0])

    def takes(seconds):
        return lambda states: clock.__setitem__(0, clock[0] + seconds * len(states))

    ways = {"preview": takes(share), "full": takes(1.0)}
    assert calibrate.measure_choices(ways, np.zeros((9, 2), np.float32), 0) == ((1, chosen),)


def test_a_precision_that_is_not_reached_is_told_and_auto_takes_the_full_product():
    weight, bias, hidden = make_layer(800, 48)
    hidden = hidden + 2 * np.random.default_rng(1).normal(size=hidden.shape).astype(np.float32)
    with pytest.warns(UserWarning, match=r"method='preview' does not reach precision=0\.99 .* but 0\.\d+"):
        short = LogitIndex.build(weight, bias, contexts=hidden, k=5, rank=4, method="preview")
    assert short.settings.reached["preview"] < 0.99
    with pytest.warns(UserWarning, match=r"no way but the full product reaches precision=0\.99"):
        index = LogitIndex.build(weight, bias, contexts=hidden, k=5, rank=4)
    assert index.settings.choices == ((1, "full"),)
    assert_largest(index.topk(hidden[:40]), exact(weight, bias, hidden[:40]), 5)


def test_only_rows_that_changed_are_coded_again(monkeypatch, tmp_path):
    weight, bias, hidden = make_layer(2000, 40)
    engine, measured = make_engine(weight, bias, hidden[:300], k=5, method="graph")
    index, before = LogitIndex(engine, measured, "graph", ""), engine.codes
    assert index.refresh(weight.copy(), bias) == 0
    assert build.encode_again(before, check_layer(weight.copy(), bias, None))[0] is before
    tuned, moved = weight.copy(), bias.copy()
    tuned[[3, 777, 1999], 5] += np.float32(0.25)
    moved[42] += 1
    coded = []
    monkeypatch.setattr(build, "encode_rows", lambda *given: coded.append(given[-1]) or codes.encode_rows(*given))
    assert index.refresh(tuned, moved) == 4
    np.testing.assert_array_equal(coded[0], [3, 42, 777, 1999])
    index.save(tmp_path / "index")
    after = open_index(tmp_path / "index", None, "read")[0].codes
    whole = codes.encode(index.layer, after.projection, after.blocks.width)
    np.testing.assert_array_equal(after.blocks.codes, whole.codes)
    np.testing.assert_allclose(after.blocks.numbers, whole.numbers, rtol=1e-6)
    np.testing.assert_array_equal(after.norms, build.row_norms(index.layer))
    assert_largest(index.topk(hidden[300:], certify=True, complete=True), exact(tuned, moved, hidden[300:]), 5)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_any_number_of_a_row_changes_its_hash(dtype):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 2**14, (50, 9)).astype(np.uint16)
    rows = rows if dtype == "bfloat16" else rng.normal(size=(50, 9)).astype(dtype)
    right = codes.hash_rows(OutputLayer(rows, dtype, np.zeros(50, np.float32)))
    assert len(set(right.tolist())) == 50
    for at in range(9):
        other = rows.copy()
        bits = other.view(f"u{other.itemsize}")
        bits[7, at] ^= 1 << int(rng.integers(8 * other.itemsize))
        found = codes.hash_rows(OutputLayer(other, dtype, np.zeros(50, np.float32)))
        assert np.flatnonzero(found != right).tolist() == [7]
    biased = codes.hash_rows(OutputLayer(rows, dtype, np.eye(50, dtype=np.float32)[3]))
    assert np.flatnonzero(biased != right).tolist() == [3]


def test_the_precision_of_far_contexts_hides_no_shortfall():
    with pytest.warns(UserWarning, match=r"no way but the full product reaches precision=0\.99 .* 0\.9800"):
        build.warn_if_short(calibrate.Settings(reached={"preview": 0.97, "graph": 0.98, "far": 0.999}), "auto")


def refreshed(index, weight):
    index.refresh(weight + 1)
    return index


def pickled(index, _):
    return pickle.loads(pickle.dumps(index))


@pytest.mark.parametrize("how", [lambda index, _: index, refreshed, pickled])
def test_room_of_unusual_calls_is_not_kept(how):
    weight, bias, hidden = make_layer(20_000, 16)
    index = how(LogitIndex.build(weight, bias, contexts=hidden, k=5, method="preview"), weight)
    index.topk(hidden[:1])
    usual = index.memory_bytes
    index.topk(hidden[:1], 20_000)
    assert index.memory_bytes <= usual


def make_rare():
    """A layer with rare words in directions of their own, and contexts of which one in 50 has such a word first."""
    rng = np.random.default_rng(3)
    weight, hidden = rng.normal(size=(2000, 40)).astype(np.float32), rng.normal(size=(4000, 40)).astype(np.float32)
    weight[:, 12:] *= 0.02
    hidden[:, 12:] *= 0.05
    weight[1972:] = np.eye(40)[12:] * 6
    hidden[np.arange(3, 4000, 50), rng.integers(12, 40, 80)] = 5
    return weight, hidden


def first_words(index, hidden, method):
    """The share of contexts whose largest logit comes first."""
    largest = (hidden @ index.layer.weight.T).argmax(1)
    return float((index.topk(hidden, method=method).indices[:, 0] == largest).mean())


def test_the_first_word_reaches_the_declared_precision_too():
    weight, hidden = make_rare()
    with pytest.warns(UserWarning, match=r"no way but the full product reaches precision=0\.99 "):
        index = LogitIndex.build(weight, contexts=hidden[:2000], rank=12)
    short = first_words(index, hidden[2000:], "preview")
    assert 0.97 < short < 0.99
    assert abs(index.stats()["precision_preview"] - short) < 0.02
    assert first_words(index, hidden[2000:], "auto") >= 0.99
    wide = LogitIndex.build(weight, contexts=hidden[:2000])
    assert wide.settings.reached["preview"] >= 0.99
    for method in ("auto", "graph", "preview"):
        assert first_words(wide, hidden[2000:], method) >= 0.99
