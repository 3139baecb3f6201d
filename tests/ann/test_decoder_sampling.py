"""Words drawn without the full product: chi-square and total variation against the full softmax; truncations."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from memhier import backend  # noqa: E402
from memhier.ann import LogitIndex, TopKSoftmax  # noqa: E402
from memhier.ann.decoder.core.evidence import is_mean_above  # noqa: E402
from memhier.ann.decoder.core.verdicts import Rule  # noqa: E402
from memhier.ann.decoder.engine.draws import DrawRequest  # noqa: E402
from memhier.ann.decoder.engine.envelope import DRAWS_MOST, Shape  # noqa: E402
from memhier.ann.decoder.engine.stored_rows import StoredRows  # noqa: E402
from memhier.ann.decoder.module.sampling import Known, Layer, Sampler  # noqa: E402
from memhier.ann.decoder.module.truncation import Truncation, drawn_of, shares_of  # noqa: E402
from tests.ann.distribution import check_distribution  # noqa: E402

WORDS, DIMENSION = 1500, 24
_STAGES = np.array([[16, 60], [64, 600], [700, 900]])
STORED = 4_000_000 if backend.core else 10_500_000  # bytes of DRAM
RULES = [
    {}, {"temperature": 0.5}, {"temperature": 2.5}, {"top_p": 0.9}, {"top_p": 0.3}, {"top_p": 0.97, "temperature": 2.0},
    {"top_k": 5}, {"top_k": 400}, {"top_k": 50, "top_p": 0.8}, {"min_p": 0.05}, {"min_p": 0.01, "temperature": 3.0},
    {"top_p": 0.9, "min_p": 0.1}, {"typical_p": 0.7}, {"epsilon_cutoff": 0.002}, {"eta_cutoff": 0.002},
    {"top_k": 30, "typical_p": 0.6, "eta_cutoff": 0.01}, {"top_p": 0.95, "epsilon_cutoff": 0.001},
]  # fmt: skip


def make_layer(words=WORDS, dimension=DIMENSION, *, strength=3.0, heavy=False, seed=0):
    """Return a layer and states, whose directions fall off; heavy rows lie along directions that codes leave out."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(words, dimension)).astype(np.float32)
    if heavy:
        weight[:, -6:] *= rng.pareto(1.5, size=(words, 1)) + 0.1
    bias = rng.normal(size=words).astype(np.float32)
    falling = strength / np.arange(1, dimension + 1) ** 0.7
    return weight, bias, (rng.normal(size=(400, dimension)) * falling).astype(np.float32)


def logits_of(index, states):
    layer = index.layer
    return states.astype(np.float64) @ layer.weight.T.astype(np.float64) + layer.bias


def draws_of(index, state, rule, count, seed=1, **more):
    layer = Layer(index, lambda states: logits_of(index, states).astype(np.float32), **more)
    sampler = Sampler(layer, rule, torch.Generator().manual_seed(seed))
    return sampler(np.repeat(state[None], count, 0)), sampler


def test_draws_of_a_batch_pay_whatever_the_build_was_measured_for():
    weight, bias, _ = make_layer(20_000, 64)
    few, many = (LogitIndex.build(weight, bias, k=k) for k in (2, 64))
    for batch in (1, 16, 256):
        assert few.draws_pay(batch, 448)
        assert many.draws_pay(batch, 448)
    assert not few.draws_pay(256, 20_000)


@pytest.mark.long
@pytest.mark.parametrize("options", RULES, ids=str)
def test_draws_have_the_distribution_of_the_full_layer(options):
    weight, bias, states = make_layer()
    index = LogitIndex.build(weight, bias, contexts=states[:300], method="preview", rank=8)
    rule = Truncation(**options)
    drawn, _ = draws_of(index, states[301], rule, 1500)
    check_distribution(drawn, shares_of(logits_of(index, states[301:302]), rule)[0])


@pytest.mark.parametrize("strength", [0.05, 3.0])
@pytest.mark.parametrize("options", [{"typical_p": 0.6}, {"eta_cutoff": 0.004}], ids=str)
def test_truncations_by_the_entropy_seldom_take_the_full_layer(options, strength):
    weight, bias, states = make_layer(strength=strength)
    index = LogitIndex.build(weight, bias, contexts=states[:300], method="preview", rank=8)
    rule = Truncation(**options)
    drawn, sampler = draws_of(index, states[305], rule, 600)
    check_distribution(drawn, shares_of(logits_of(index, states[305:306]), rule)[0])
    assert sum(sampler.full_rows.values()) < 60


@pytest.mark.parametrize("strength", [0.05, 1.0, 3.0])
@pytest.mark.parametrize("min_p", [0.02, 0.3, 1.0])
def test_shares_of_the_likeliest_words_probability_do_not_take_the_full_layer(min_p, strength):
    weight, bias, states = make_layer(strength=strength)
    index = LogitIndex.build(weight, bias, contexts=states[:300], method="preview", rank=8)
    rule = Truncation(temperature=1.5, min_p=min_p)
    drawn, sampler = draws_of(index, states[306], rule, 600)
    check_distribution(drawn, shares_of(logits_of(index, states[306:307]), rule)[0])
    assert not sampler.full_rows


@pytest.mark.parametrize("temperature", [1.0, 5.0])
@pytest.mark.parametrize("equals", [1, 3, 40])
def test_a_word_is_not_nearer_to_the_mean_score_than_itself_or_its_equals(equals, temperature):
    weight, bias, states = make_layer()
    weight[:equals], bias[:equals] = 500 * states[302] / np.linalg.norm(states[302]), 0
    index = LogitIndex.build(weight, bias, contexts=states[:300], method="preview", rank=8)
    drawn, sampler = draws_of(index, states[302], Truncation(temperature, typical_p=0.8), 200)
    assert set(drawn) == set(range(equals))
    assert not sampler.full_rows


@pytest.mark.filterwarnings("ignore:.*hidden states are unlike the contexts")
def test_words_of_the_tail_that_are_seldom_drawn_do_not_lead_astray():
    """The mean score without words far below, that a sample of the tail hardly ever holds, is another."""
    weight = np.zeros((4000, 24), np.float32)
    weight[:, :3] = np.random.default_rng(0).normal(size=(4000, 3))
    weight[300:, 23] = 40.0  # beyond the codes: bounds are far above
    contexts = np.random.default_rng(1).normal(size=(300, 24)).astype(np.float32) * 0.3
    contexts[:, 23] *= 0.01
    index = LogitIndex.build(weight, contexts=contexts, method="preview", rank=4)
    state = np.zeros(24, np.float32)
    state[:3], state[23] = 1.0, -0.05
    for options in ({"typical_p": 0.4}, {"eta_cutoff": 0.01}):
        drawn, _ = draws_of(index, state, Truncation(**options), 1500)
        check_distribution(drawn, shares_of(logits_of(index, state[None]), Truncation(**options))[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not reach precision=")  # of heavy rows at this rank; draws are exact
@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("strength", [0.05, 1.0, 6.0])
@pytest.mark.parametrize("options", RULES, ids=str)
def test_twenty_thousand_draws_of_flat_and_peaked_states(options, strength, heavy):
    weight, bias, states = make_layer(3000, 40, strength=strength, heavy=heavy, seed=4)
    index = LogitIndex.build(weight, bias, contexts=states[:300], method="preview", rank=8)
    rule = Truncation(**options)
    drawn, _ = draws_of(index, states[333], rule, 20_000)
    check_distribution(drawn, shares_of(logits_of(index, states[333:334]), rule)[0])


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}], ids=str)
@pytest.mark.parametrize("cap", [0.0, 4.0])
def test_scales_caps_and_words_that_were_changed_count(options, cap):
    weight, bias, states = make_layer()
    index = LogitIndex.build(weight, bias, contexts=states[:300], method="preview", rank=8)
    shape, rule, state = Shape(cap, 0.5 if not cap else 1.0), Truncation(**options), states[310]

    def finish(logits):
        return shape(logits) * shape.inverse

    def full(some):
        return finish(logits_of(index, some)).astype(np.float32)

    logits = finish(logits_of(index, state[None]))
    likeliest = np.argsort(-logits[0])
    words = np.concatenate([likeliest[[0, 3, 40]], likeliest[[900, 1000]], [-1]])
    changed = np.array([-np.inf, 1.0, 2.0, float(logits.max()), -np.inf, 7.0])
    known = Known(np.repeat(words[None], 1500, 0), np.repeat(changed[None], 1500, 0))
    sampler = Sampler(Layer(index, full, finish, shape), rule, torch.Generator().manual_seed(2))
    drawn = sampler(np.repeat(state[None], 1500, 0), known)
    logits[0, words[:-1]] = changed[:-1]
    check_distribution(drawn, shares_of(logits, rule)[0])


@pytest.mark.filterwarnings("ignore:.*hidden states are unlike the contexts")
def test_wide_rows_alone_take_the_full_product():
    weight, bias, states = make_layer(6000, 64, strength=1.0)
    index = LogitIndex.build(weight, bias, contexts=states[:300], method="preview")
    asked = []

    def full(some):
        asked.append(len(some))
        return logits_of(index, some).astype(np.float32)

    narrow = 8 * states[300:330]
    sampler = Sampler(Layer(index, full), Truncation(top_p=0.9), torch.Generator().manual_seed(0))
    sampler(np.concatenate([narrow, 0.01 * states[330:332]]))
    assert sum(asked) <= 4
    assert sampler.full_rows == ({"undecided": sum(asked)} if asked else {})


def test_each_state_that_takes_the_full_product_is_counted_by_cause():
    head = torch.nn.Linear(DIMENSION, WORDS)
    weight, bias, states = make_layer()
    head.weight.data, head.bias.data = torch.from_numpy(weight), torch.from_numpy(bias)
    contexts, hidden = torch.from_numpy(states[:300]), torch.from_numpy(states[300:307])
    decoder = TopKSoftmax.from_linear(head, k=10, contexts=contexts, method="preview")
    for _ in range(2):
        decoder.sample(hidden, top_p=0.9, typical_p=0.9)
    decoder.sample(hidden, top_p=0.9, eta_cutoff=0.01)
    decoder.sample(hidden, top_k=20, eta_cutoff=0.01)
    assert decoder.stats()["sampled_in_full"] == {"typical_p": 14, "eta_cutoff": 7}
    small = TopKSoftmax.from_linear(head, k=10, contexts=contexts)
    small.sample(hidden.repeat(100, 1), top_p=0.9)
    assert small.stats()["sampled_in_full"] == {"faster": 700}


def test_both_cores_bound_and_draw_alike(monkeypatch):
    if backend.core is None:
        pytest.skip("no compiled core to compare with")
    weight, bias, states = make_layer()
    seeds, asked = np.random.default_rng(0).integers(0, 2**64, 60, np.uint64), np.repeat(states[300:306], 10, 0)
    out = np.random.default_rng(1).permuted(np.tile(np.arange(WORDS), (60, 1)), axis=1)[:, :9]
    out[:, 3] = -1
    scores = np.random.default_rng(2).normal(size=out.shape)
    compiled = LogitIndex.build(weight, bias, contexts=states[:300], method="preview", rank=8)
    monkeypatch.setattr(backend, "core", None)
    plain = LogitIndex.build(weight, bias, contexts=states[:300], method="preview", rank=8)
    for shape in (Shape(), Shape(0.0, 2.5), Shape(5.0, 0.4)):
        right, found = (index.envelope(asked, 50, shape, out=out) for index in (compiled, plain))
        assert (np.sort(found.rows) == np.sort(right.rows)).mean() > 0.99
        assert not (right.rows[:, :, None] == out[:, None, :]).any()
        np.testing.assert_allclose(found.cut, right.cut, rtol=1e-4)
        np.testing.assert_allclose(found.log_sum, right.log_sum, rtol=1e-4, atol=1e-4)
        exact = np.take_along_axis(logits_of(compiled, asked), right.rows, 1)
        np.testing.assert_allclose(right.logits, exact, rtol=1e-4, atol=1e-4)
        finish = None if shape == Shape() else lambda logits, shape=shape: shape(logits) * shape.inverse
        rules = [Rule(), Rule(top_p=0.8), Rule(0.95, 0.01), Rule(epsilon_cutoff=2e-3), Rule(typical_p=0.7)]
        for rule in (*rules, Rule(eta_cutoff=0.01), Rule(min_p=0.1)):
            request = DrawRequest(rule, 1.0, shape, _STAGES, seeds, out, scores, finish)
            (right_words, right_stays), (words, stays) = (index.draw(asked, request) for index in (compiled, plain))
            assert (words == right_words).mean() > 0.95
            assert (stays == right_stays).mean() > 0.95
            assert stays.mean() > 0.2


def test_an_interrupt_while_a_core_asks_for_logits_leaves_the_index_as_it_was():
    weight, bias, states = make_layer()
    index = LogitIndex.build(weight, bias, contexts=states[:300], method="preview", rank=8)

    def finish(logits):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        draws_of(index, states[300], Truncation(top_p=0.9), 3, finish=finish)
    changed, _ = draws_of(index, states[300], Truncation(top_p=0.9), 100, finish=np.asarray)
    assert (changed == draws_of(index, states[300], Truncation(top_p=0.9), 100)[0]).all()


def test_a_head_of_all_words_leaves_no_tail():
    weight, bias, states = make_layer(70, 8)
    index = LogitIndex.build(weight, bias, contexts=states[:300], method="preview")
    found = index.envelope(states[:2], 500)
    assert np.isneginf(found.cut).all()
    drawn, _ = draws_of(index, states[0], Truncation(top_p=0.9), 2000)
    check_distribution(drawn, shares_of(logits_of(index, states[:1]), Truncation(top_p=0.9))[0])


def test_rows_on_ssd_are_drawn_as_well(tmp_path):
    weight, bias, states = make_layer(4000, 256)
    index = LogitIndex.build(
        weight, bias, contexts=states[:300], method="preview", path=tmp_path / "index", dram=STORED
    )
    assert index.layer is None
    logits = states[300:301].astype(np.float64) @ weight.T.astype(np.float64) + bias
    sampler = Sampler(Layer(index, index.logits), Truncation(top_p=0.8), torch.Generator().manual_seed(0))
    drawn = sampler(np.repeat(states[300:301], 200, 0))
    check_distribution(drawn, shares_of(logits, Truncation(top_p=0.8))[0])


def test_rows_on_ssd_are_read_for_all_states_of_a_batch_at_once(tmp_path, monkeypatch):
    weight, bias, states = make_layer(4000, 256)
    index = LogitIndex.build(
        weight, bias, contexts=states[:300], method="preview", path=tmp_path / "index", dram=STORED
    )
    batch, logits, reads = np.repeat(states[300:310], 3, 0), StoredRows.logits, []

    def count_reads(self, hidden, candidates):
        reads.append(len(hidden))
        return logits(self, hidden, candidates)

    monkeypatch.setattr(StoredRows, "logits", count_reads)
    for options in ({}, {"top_p": 0.8}, {"typical_p": 0.8}):
        drawn = []
        for at_once in (1, 7, 30):
            reads.clear()
            monkeypatch.setattr(StoredRows, "states_at_once", lambda self, candidates, at_once=at_once: at_once)
            sampler = Sampler(Layer(index, index.logits), Truncation(**options), torch.Generator().manual_seed(0))
            drawn.append(sampler(batch))
        assert reads[0] == len(batch)
        assert len(reads) < 12 < sum(reads)
        assert (drawn[0] == drawn[1]).all()
        assert (drawn[0] == drawn[2]).all()


def test_a_warning_of_unlike_states_names_the_users_call():
    weight, bias, states = make_layer()
    index = LogitIndex.build(weight, bias, contexts=states[:300], method="preview")
    for ask in (lambda module: module.sample, lambda module: module.topk):
        module = TopKSoftmax(copy.copy(index), None, None)
        with pytest.warns(UserWarning, match="hidden states are unlike") as caught:
            ask(module)(torch.from_numpy(100 * states[:32]))
        assert caught[0].filename == __file__


def test_bounds_of_all_words_count_as_memory_and_stay_for_the_next_call():
    if backend.core is None:
        pytest.skip("needs the compiled core")
    weight, bias, states = make_layer(40_000, 8)
    index = LogitIndex.build(weight, bias, contexts=states[:300], method="preview")
    index.topk(states[:4])
    before = index.memory_bytes
    for _ in range(3):
        index.envelope(states[:4], 5)
        assert 16 * 40_000 <= index.memory_bytes - before <= 17 * 40_000


def test_workspaces_of_the_largest_draws_count_as_planned_and_stay():
    weight, bias, states = make_layer(20_000, 8)
    index = LogitIndex.build(weight, bias, contexts=states[:300], method="preview")
    index.topk(states[:4])
    before, sizes = index.memory_bytes, []
    for _ in range(2):
        index.envelope(states[:4], DRAWS_MOST)
        draws_of(index, states[301], Truncation(top_p=0.9, temperature=50.0), 4)
        sizes.append(index.memory_bytes)
    assert sizes[0] == sizes[1]
    if backend.core is not None:
        assert sizes[0] - before > 16 * 20_000 + 12 * DRAWS_MOST


def test_no_states_have_an_empty_envelope(tmp_path):
    weight, bias, states = make_layer(4000, 256)
    index = LogitIndex.build(
        weight, bias, contexts=states[:300], method="preview", path=tmp_path / "index", dram=STORED
    )
    assert index.layer is None
    assert index.envelope(states[:0], 5).rows.shape == (0, 5)
    assert Sampler(Layer(index, index.logits), Truncation(top_p=0.9))(states[:0]).shape == (0,)


def test_draws_are_fixed_by_the_generator_and_differ_without():
    weight, bias, states = make_layer()
    index = LogitIndex.build(weight, bias, contexts=states[:300], method="preview", rank=8)
    one, other, third = (draws_of(index, states[300], Truncation(), 200, seed)[0] for seed in (5, 5, 6))
    assert (one == other).all()
    assert (one != third).any()


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.9, "typical_p": 0.9}], ids=str)
def test_states_that_are_not_finite_are_refused_before_the_generator_moves_on(options):
    weight, bias, states = make_layer()
    index = LogitIndex.build(weight, bias, contexts=states[:300], method="preview", rank=8)
    bad, generator = states[300:304].copy(), torch.Generator().manual_seed(5)
    bad[3, 2] = np.nan
    before = generator.get_state()
    with pytest.raises(ValueError, match=r"hidden\[3, 2\]=nan"):
        Sampler(Layer(index, index.logits), Truncation(**options), generator)(bad)
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("mean", [0.002, 0.08, 0.5, 0.97])
def test_evidence_is_never_wrong_and_decides_before_long(mean):
    rng = np.random.default_rng(0)
    spread = np.clip(mean * rng.lognormal(-0.02, 0.2, size=(300, 400)), 0, 1)
    coins = (rng.random((300, 400)) < mean).astype(float)
    for sample, right in ((spread, spread.mean()), (coins, mean)):
        for share in (0.0, 0.3, 0.7, 0.98, 1.02, 1.5, 4.0):
            limit = np.full(300, share * right)
            verdict = is_mean_above(sample, limit)
            assert not (verdict == (1 if share > 1 else -1)).any()
        assert (is_mean_above(sample, np.full(300, -0.1)) == 1).all()
        assert (is_mean_above(sample, np.full(300, 1.1)) == -1).all()
    assert (is_mean_above(spread, np.full(300, 0.5 * mean)) == 1).all()


def test_an_unseen_heavy_part_is_left_open():
    sample = np.full((1, 100), 0.1)
    assert is_mean_above(sample, np.array([0.15]))[0] == 0, "one number in fifty may be 1"
    assert is_mean_above(np.full((1, 4000), 0.1), np.array([0.15]))[0] == -1


def test_a_uniform_number_falls_on_a_word_with_a_share():
    shares = np.array([[0.0, 0.5, 0.0, 0.5, 0.0]] * 3)
    words = np.arange(5)[None].repeat(3, 0)
    assert drawn_of(words, shares, np.array([0.0, 0.5, 1 - 2**-53])).tolist() == [1, 3, 3]


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.6, 0.95, 1 - 1e-12])
def test_a_nucleus_is_that_of_a_stable_sort_with_equal_words_at_its_end(top_p):
    rng = np.random.default_rng(0)
    for logits in (rng.normal(size=(4, 3000)), rng.integers(0, 6, (4, 700)).astype(float), np.zeros((2, 50))):
        shares = shares_of(logits, Truncation())
        falling = np.argsort(shares, axis=1, kind="stable")[:, ::-1]
        ordered = np.take_along_axis(shares, falling, 1)
        kept = np.zeros(logits.shape, bool)
        np.put_along_axis(kept, falling, np.cumsum(ordered, 1) - ordered < top_p, 1)
        assert ((shares_of(logits, Truncation(top_p=top_p)) > 0) == kept).all()


@pytest.mark.parametrize("top_k", [1500, 8000, 9000])
def test_lists_as_long_as_a_head_have_their_distribution(top_k):
    weight, bias, states = make_layer(12_000, 12)
    index = LogitIndex.build(weight, bias, contexts=states[:300], method="preview")
    rule = Truncation(top_k=top_k)
    drawn, sampler = draws_of(index, states[301], rule, 300)
    check_distribution(drawn, shares_of(logits_of(index, states[301:302]), rule)[0])
    assert sampler.full_rows == ({"top_k beyond the bounds": 300} if top_k > DRAWS_MOST else {})


@pytest.mark.filterwarnings("ignore:.*does not reach precision", "error::RuntimeWarning")
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"typical_p": 0.9}, {"eta_cutoff": 1e-3}])
def test_sums_of_bounds_beyond_double_precision_draw_without_a_warning(options):
    weight, bias, states = make_layer()
    index = LogitIndex.build(weight, bias, contexts=states[:300], method="preview", rank=2)
    rule = Truncation(temperature=1e-6, **options)
    drawn = Sampler(Layer(index, index.logits), rule, torch.Generator().manual_seed(0))(states[300:320])
    assert (drawn == index.logits(states[300:320]).argmax(1)).all()


@pytest.mark.filterwarnings("ignore:.*hidden states are unlike the contexts")
@pytest.mark.parametrize("words", [50, 1500])
@pytest.mark.parametrize("states", ["zero", "far", "gaussian", "none"])
def test_the_least_nucleus_and_the_coldest_draw_are_the_likeliest_word(words, states):
    weight, bias, contexts = make_layer(words)
    head = torch.nn.Linear(DIMENSION, words)
    head.weight.data, head.bias.data = torch.from_numpy(weight), torch.from_numpy(bias)
    decoder = TopKSoftmax.from_linear(head, k=10, contexts=torch.from_numpy(contexts[:300]), method="preview")
    gaussian = np.random.default_rng(3).normal(size=(6, DIMENSION)).astype(np.float32)
    factors = {"zero": 0.0, "far": 1e4, "gaussian": 1.0, "none": 1.0}
    hidden = torch.from_numpy(factors[states] * gaussian[: 0 if states == "none" else 6])
    with torch.no_grad():
        likeliest = head(hidden).argmax(1)
    for options in ({"top_p": 1e-9}, {"top_k": 1}, {"temperature": 1e-6}, {"top_p": 0.9, "temperature": 1e-6}):
        assert (decoder.sample(hidden, **options) == likeliest).all()
    for options in ({"top_p": 1.0}, {"temperature": 10.0, "top_p": 0.5}, {"top_k": words}):
        assert decoder.sample(hidden.bfloat16(), **options).shape == (len(hidden),)


@pytest.mark.parametrize("name", ["top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"])
def test_truncations_of_impossible_shares_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}=0: expected above 0, at most 1"):
        Truncation(**{name: 0})
