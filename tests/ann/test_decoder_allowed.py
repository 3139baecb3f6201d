"""Answers among allowed words: every form of them, every way, both cores, stored rows, against the full product."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier import backend
from memhier.ann.decoder import LogitIndex
from memhier.ann.decoder import index as decoder_index
from memhier.ann.decoder.allowed import check_allowed
from memhier.ann.decoder.answers import TopK
from memhier.ann.decoder.layer import as_floats

STORED = 4_050_000 if backend.core else 5_500_000  # bytes of DRAM
WORDS, DIMENSION, K = 600, 16, 5


def make_layer(words=WORDS, dimension=DIMENSION, seed=0):
    """A layer and contexts with a few strong directions, as models have."""
    rng = np.random.default_rng(seed)
    strength = 1 / np.arange(1, dimension + 1)
    weight = (rng.normal(size=(words, dimension)) + rng.normal(size=dimension)).astype(np.float32)
    hidden = (rng.normal(size=(400, dimension)) * strength * 4 + rng.normal(size=dimension) * 0.3).astype(np.float32)
    return weight, rng.normal(size=words).astype(np.float32), hidden


def masked(weight, bias, hidden, mask):
    logits = hidden.astype(np.float64) @ weight.T.astype(np.float64) + bias
    return np.where(mask, logits, -np.inf)


def assert_among(found, logits, *, share=1.0):
    """Values are exact logits of allowed words, and at least a share of them are among the k largest."""
    k = found.values.shape[1]
    right = -np.sort(-logits, 1)[:, :k]
    present = found.indices >= 0
    np.testing.assert_array_equal(present.sum(1), np.minimum(k, np.isfinite(logits).sum(1)))
    np.testing.assert_array_equal(found.values > -np.inf, present)
    named = np.take_along_axis(logits, np.maximum(found.indices, 0), 1)
    np.testing.assert_allclose(found.values[present], named[present], rtol=1e-4, atol=1e-4)
    assert (found.values[:, 1:] <= found.values[:, :-1]).all()
    assert all(len(set(row[row >= 0].tolist())) == (row >= 0).sum() for row in found.indices)
    least = np.where(np.isfinite(right), right, np.inf).min(1)[:, None]
    assert (found.values >= least - 1e-4 * np.maximum(1, np.abs(least)))[present].mean() >= share


def bits_of(mask):
    """Bits of int32 as grammar engines fill them, all set beyond the vocabulary."""
    rows = np.atleast_2d(mask)
    words = -(-rows.shape[1] // 32)
    whole = np.ones((len(rows), 32 * words), bool)
    whole[:, : rows.shape[1]] = rows
    bits = np.packbits(whole, axis=1, bitorder="little").view("<i4").astype(np.int32)
    return bits.reshape(*mask.shape[:-1], words)


def check(allowed, states, words, native):
    """Take allowed words by either core."""
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(backend, "core", None)
        return check_allowed(allowed, states, words)


@pytest.fixture(scope="module", params=["native", "python"])
def index(request):
    """An index with a graph, whose codes hold half of the directions, of both cores by turns."""
    if request.param == "native" and backend.core is None:
        pytest.skip("needs the compiled core")
    weight, bias, hidden = make_layer()
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            patch.setattr(backend, "core", None)
        return LogitIndex.build(weight, bias, contexts=hidden[:300], k=K, method="graph", rank=8)


@pytest.fixture(params=["listed", "scanned"])
def way(request, monkeypatch):
    """Allowed words listed where that pays, and scanned however few they are."""
    if request.param == "scanned":
        monkeypatch.setattr(decoder_index, "listed_costs_less", lambda *_: False)


@pytest.mark.parametrize("native", [True, False])
@settings(max_examples=40, deadline=None)
@given(words=st.integers(1, 700), states=st.integers(1, 4), share=st.floats(0.01, 1), seed=st.integers(0, 10**6))
def test_all_forms_name_the_same_words(native, words, states, share, seed):
    rng = np.random.default_rng(seed)
    mask = rng.random((states, words)) < share
    mask[np.arange(states), rng.integers(0, words, states)] = True
    ids = [rng.permutation(np.concatenate([np.flatnonzero(row)] * 2)) for row in mask]
    forms = [
        mask,
        list(mask),
        bits_of(mask),
        list(bits_of(mask)),
        bits_of(mask).view(np.uint32),
        ids,
        [each.tolist() for each in ids],
    ]
    if len({len(each) for each in ids}) == 1:
        forms.append(np.stack(ids))
    for form in forms:
        found = check(form, states, words, native)
        np.testing.assert_array_equal(found.mask(), mask)
        np.testing.assert_array_equal(found.counts, mask.sum(1))
    for form in (mask[0], bits_of(mask[0]), ids[0], ids[0].tolist()):
        found = check(form, states, words, native)
        assert found.shared
        np.testing.assert_array_equal(found.mask(), mask[:1])
        np.testing.assert_array_equal(found.counts, mask[:1].sum(1))


@pytest.mark.parametrize("method", ["auto", "graph", "screen", "preview", "full"])
@pytest.mark.parametrize("count", [1, 3, 40, 280, 500, WORDS])
def test_every_way_finds_the_largest_allowed(index, way, method, count):
    weight, bias, hidden = make_layer()
    rng = np.random.default_rng(count)
    shared = np.isin(np.arange(WORDS), rng.permutation(WORDS)[:count])
    own = np.stack([np.isin(np.arange(WORDS), rng.permutation(WORDS)[:count]) for _ in range(40)])
    for batch, mask in ((1, shared), (7, shared), (40, shared), (40, own), (1, own)):
        states, mask = hidden[300 : 300 + batch], mask if mask.ndim == 1 else mask[:batch]
        exact = method == "full"
        found = index.topk(states, allowed=bits_of(mask), method=method)
        assert_among(found, masked(weight, bias, states, mask), share=1.0 if exact else 0.97)
        again = index.topk(states, allowed=mask, method=method)
        np.testing.assert_array_equal(found.indices, again.indices)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("count", [2, 30, 400])
def test_certified_answers_are_those_of_the_masked_full_product(way, dtype, count):
    weight, bias, hidden = make_layer()
    stored = (weight.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else weight.astype(dtype)
    index = LogitIndex.build(stored, bias, dtype=dtype, contexts=hidden[:300], k=K, method="preview", rank=8)
    mask = np.random.default_rng(1).random((100, WORDS)).argsort(1) < count
    logits = masked(as_floats(stored, dtype), bias, hidden[300:], mask)
    assert_among(index.topk(hidden[300:], allowed=mask, certify=True, complete=True), logits)
    found = index.topk(hidden[300:], allowed=mask, certify=True)
    assert found.proven.mean() > 0.5
    order = np.argsort(-logits, 1, kind="stable")[:, : min(K, count)]
    for row in np.flatnonzero(found.proven):
        assert set(found.indices[row].tolist()) - {-1} == set(order[row].tolist())


@settings(max_examples=30, deadline=None)
@given(words=st.integers(1, 600), share=st.floats(0.001, 1), seed=st.integers(0, 10**6), far=st.booleans())
def test_proofs_and_log_probabilities_hold_for_any_context(words, share, seed, far):
    weight, bias, hidden = make_layer(words, 8, seed)
    index = LogitIndex.build(weight, bias, k=1, rank=4)
    rng = np.random.default_rng(seed)
    mask = rng.random((6, words)) < share
    mask[np.arange(6), rng.integers(0, words, 6)] = True
    states = hidden[:6] * np.float32(30 if far else 1)
    logits = masked(weight, bias, states, mask)
    targets = rng.integers(0, words, 6)
    with np.errstate(divide="ignore"):
        right = logits[np.arange(6), targets] - np.logaddexp.reduce(logits, axis=1)
    engine_ways = [
        index.log_prob(states, targets, allowed=mask),
        index.log_prob(states, targets, allowed=mask, exact=True),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder_index, "listed_costs_less", lambda *_: False)
        engine_ways.append(index.log_prob(states, targets, allowed=mask))
        proof = index.topk(states, min(3, words), allowed=mask, certify=True)
    for found in engine_ways:
        assert (found.low <= right + 1e-6).all()
        assert (right <= found.high + 1e-6).all()
        np.testing.assert_array_equal(found.estimate == -np.inf, ~mask[np.arange(6), targets])
    for row in np.flatnonzero(proof.proven):
        order = np.argsort(-logits[row], kind="stable")[: min(3, int(mask[row].sum()))]
        assert set(proof.indices[row].tolist()) - {-1} == set(order.tolist())


@pytest.mark.long
def test_the_two_cores_agree(way):
    if backend.core is None:
        pytest.skip("needs the compiled core")
    weight, bias, hidden = make_layer()
    states = hidden[300:340]
    mask = np.random.default_rng(1).random((40, WORDS)) < np.linspace(0.02, 0.9, 40)[:, None]
    answers = []
    with pytest.MonkeyPatch.context() as patch:
        for _ in range(2):
            index = LogitIndex.build(weight, bias, contexts=hidden[:300], k=K, method="graph", rank=8)
            calls = [index.topk(states, allowed=mask, method=method) for method in ("graph", "screen", "preview")]
            calls.append(index.topk(states, allowed=mask, certify=True))
            answers.append((calls, index.log_prob(states, np.arange(40), allowed=mask)))
            patch.setattr(backend, "core", None)
    (native, score), (python, python_score) = answers
    for one, other in zip(native, python, strict=True):
        assert (one.indices == other.indices).mean() > 0.99
        np.testing.assert_allclose(one.values, other.values, rtol=1e-4, atol=1e-5)
    assert (native[3].proven == python[3].proven).mean() > 0.95
    np.testing.assert_allclose(score.estimate, python_score.estimate, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("count", [3, 200, 1000, 1960])
def test_rows_on_ssd_are_answered_alike(tmp_path, count):
    weight, bias, hidden = make_layer(2000, 512)
    index = LogitIndex.build(weight, bias, contexts=hidden[:300], k=K, method="graph", rank=32)
    index.save(tmp_path / "index")
    stored = LogitIndex.open(tmp_path / "index", dram=STORED)
    assert stored.layer is None
    mask = np.random.default_rng(1).random((20, 2000)).argsort(1) < count
    states = hidden[300:320]
    logits = masked(weight, bias, states, mask)
    targets = logits.argmax(1)
    right = logits.max(1) - np.logaddexp.reduce(logits, axis=1)
    for method in ("graph", "screen", "preview", "full"):
        assert_among(stored.topk(states, allowed=mask, method=method), logits, share=0.97)
    assert_among(stored.topk(states, allowed=mask, certify=True, complete=True), logits)
    assert_among(stored.topk(states, allowed=bits_of(mask[0]), certify=True, complete=True),
                 masked(weight, bias, states, mask[0]))  # fmt: skip
    score = stored.log_prob(states, targets, allowed=mask)
    assert ((score.low <= right + 1e-6) & (right <= score.high + 1e-6)).all()
    np.testing.assert_allclose(score.estimate, right, atol=0.05)
    assert stored.memory_bytes <= STORED
    stored.close()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*does not reach precision")
def test_few_allowed_words_are_compared_exactly_whatever_the_method():
    weight, bias, hidden = make_layer(8000, 16)
    index = LogitIndex.build(weight, bias, contexts=hidden[:300], k=K, method="screen", rank=4)
    rare = np.argsort(masked(weight, bias, hidden[300:], True).max(0))[:100]
    mask = np.isin(np.arange(8000), rare)
    for method in ("auto", "graph", "screen", "preview"):
        found = index.topk(hidden[300:], allowed=rare, method=method)
        assert_among(found, masked(weight, bias, hidden[300:], mask))


def test_few_words_share_all_probability():
    weight, bias, hidden = make_layer()
    index = LogitIndex.build(weight, bias, contexts=hidden[:300], k=K, method="preview")
    ids = [7, 3, 99, 500]
    scores = [index.log_prob(hidden[300:], np.full(100, word), allowed=ids).estimate for word in ids]
    np.testing.assert_allclose(np.exp(scores).sum(0), 1, rtol=2e-5)


def test_a_module_takes_tensors_of_any_leading_shape():
    torch = pytest.importorskip("torch")
    from memhier.ann import TopKSoftmax

    weight, bias, hidden = make_layer()
    head = torch.nn.Linear(DIMENSION, WORDS)
    head.weight.data, head.bias.data = torch.from_numpy(weight), torch.from_numpy(bias)
    decoder = TopKSoftmax.from_linear(head, k=K, contexts=torch.from_numpy(hidden[:300]))
    states = torch.from_numpy(hidden[300:306]).reshape(2, 3, DIMENSION)
    mask = np.random.default_rng(0).random((6, WORDS)) < 0.3
    logits = masked(weight, bias, hidden[300:306], mask)
    lists = [torch.from_numpy(np.flatnonzero(row)) for row in mask]
    targets = torch.from_numpy(logits.argmax(1)).reshape(2, 3)
    for form in (torch.from_numpy(mask), torch.from_numpy(bits_of(mask)), lists, mask):
        values, indices, _ = decoder.certified_topk(states, allowed=form)
        assert values.shape == indices.shape == (2, 3, K)
        assert_among(TopK(values.reshape(6, K).numpy(), indices.reshape(6, K).numpy()), logits)
        values, indices = decoder.topk(states, 2, allowed=form)
        assert_among(TopK(values.reshape(6, 2).numpy(), indices.reshape(6, 2).numpy()), logits, share=0.9)
        estimate, low, high = decoder.bounded_log_prob(states, targets, allowed=form)
        right = torch.from_numpy(logits.max(1) - np.logaddexp.reduce(logits, axis=1)).reshape(2, 3)
        assert ((low <= right + 1e-6) & (right <= high + 1e-6)).all()
        torch.testing.assert_close(decoder.log_prob(states, targets, allowed=form), estimate)


def test_no_states_have_no_answers():
    weight, bias, hidden = make_layer()
    index = LogitIndex.build(weight, bias, contexts=hidden[:300], k=K)
    for allowed in ([3, 5], [], np.ones((0, WORDS), bool), np.ones(WORDS, bool)):
        assert index.topk(hidden[:0], allowed=allowed).indices.shape == (0, K)
        assert index.log_prob(hidden[:0], np.empty(0, int), allowed=allowed).estimate.shape == (0,)


@pytest.mark.parametrize(
    ("allowed", "error", "words"),
    [
        (np.zeros(WORDS, bool), ValueError, "allowed holds no word"),
        (np.arange(2 * WORDS).reshape(2, WORDS) < WORDS, ValueError, r"allowed\[1\] holds no word"),
        ([[3], []], ValueError, r"allowed\[1\] holds no word"),
        ([], ValueError, "allowed holds no word"),
        (np.zeros(-(-WORDS // 32), np.int32), ValueError, "allowed holds no word"),
        (np.ones(WORDS + 1, bool), ValueError, rf"mask of bool expected \[{WORDS}\] or \[2, {WORDS}\], got \[601\]"),
        (np.ones((3, WORDS), bool), ValueError, r"got \[3, 600\]"),
        (np.ones(18, np.int32), ValueError, r"give ids as int64: expected \[19\] or \[2, 19\], got \[18\]"),
        ([3, WORDS], ValueError, "allowed: expected ids of 0 to 599, got 600"),
        ([[3], [-1]], ValueError, r"allowed\[1\]: expected ids of 0 to 599, got -1"),
        ([[3], [1], [2]], ValueError, "expected one for each of the 2 hidden states, got 3"),
        ([[3], np.array([1], np.int32)], TypeError, r"allowed\[1\]: expected a mask .*; got int32 \[1\]"),
        (np.ones(WORDS), TypeError, r"expected a mask .*; got float64 \[600\]"),
        ("words", TypeError, "allowed: expected a mask"),
        (np.array(3), TypeError, "allowed: expected a mask"),
    ],
)  # fmt: skip
def test_allowed_words_that_do_not_fit_are_named(allowed, error, words):
    weight, bias, hidden = make_layer()
    index = LogitIndex.build(weight, bias, contexts=hidden[:300], k=K, method="preview")
    for call in (index.topk, lambda states, allowed: index.log_prob(states, [0, 1], allowed=allowed)):
        with pytest.raises(error, match=words):
            call(hidden[:2], allowed=allowed)


def test_states_that_are_not_finite_are_named(index):
    _, _, hidden = make_layer()
    bad = hidden[:4].copy()
    bad[2, 5] = np.nan
    for count in (3, 500):
        with pytest.raises(ValueError, match=r"hidden\[2, 5\]=nan"):
            index.topk(bad, allowed=np.arange(count))


@pytest.fixture(scope="module")
def trained(data):
    """An index of the 10,000 most frequent words of a trained layer, the layer, and contexts to ask."""
    folder = data("lm-softmax-50k")
    weight = np.load(folder / "weight_f16.npy")[:10_000].astype(np.float32)
    bias, contexts = np.load(folder / "bias_f32.npy")[:10_000], np.load(folder / "calibration_books_f16.npy")
    index = LogitIndex.build(weight, bias, contexts=contexts.astype(np.float32), k=10, method="graph")
    return index, weight, bias, np.load(folder / "contexts_books_f16.npy")[:64].astype(np.float32)


@pytest.mark.long
@pytest.mark.parametrize("count", [20, 200, 2000, 8000])
@pytest.mark.parametrize("kind", ["any", "frequent", "rare"])
def test_a_trained_layer(trained, kind, count):
    index, weight, bias, asked = trained
    words = len(weight)
    order = np.random.default_rng(2).permutation(words) if kind == "any" else np.arange(words)
    mask = np.isin(np.arange(words), order[-count:] if kind == "rare" else order[:count])
    logits = masked(weight, bias, asked, mask)
    for method in ("graph", "screen", "preview"):
        found = index.topk(asked, allowed=mask, method=method)
        assert_among(found, logits, share=1 if count <= 200 else 0.99)
    assert_among(index.topk(asked, allowed=bits_of(mask), certify=True, complete=True), logits)
