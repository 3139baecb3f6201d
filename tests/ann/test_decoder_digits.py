"""The preview by digits of two bits: its codes, its answers, and a build that takes it where it pays."""

from dataclasses import replace

import numpy as np
import pytest

from memhier.ann.decoder import LogitIndex
from memhier.ann.decoder.allowed import check_allowed
from memhier.ann.decoder.calibration import build, calibrate
from memhier.ann.decoder.calibration.build import BuildOptions, build_codes
from memhier.ann.decoder.coding.codes import RowCodes
from memhier.ann.decoder.coding.digits import DIGITS, DigitCodes
from memhier.ann.decoder.core import core as core_module
from memhier.ann.decoder.engine.dram_engine import DramEngine
from memhier.ann.decoder.engine.engine import Coarse
from memhier.ann.decoder.layer import check_layer
from memhier.ann.decoder.stored import open_index, save_index
from memhier.errors import CorruptionError


def make_model(words, dimension):
    """A layer with a common component and contexts of low rank."""
    rng = np.random.default_rng(0)
    topics = rng.normal(size=(12, dimension))
    weight = rng.normal(size=(words, 12)) @ topics * 0.35 + rng.normal(size=(words, dimension)) * 0.1
    weight += 2 * rng.normal(size=dimension)
    hidden = rng.normal(size=(2400, 12)) @ topics * 0.5 + rng.normal(size=(2400, dimension)) * 0.05
    bias = -np.log(np.arange(1, words + 1)) - 3
    return weight.astype(np.float32), bias.astype(np.float32), hidden.astype(np.float32)


@pytest.fixture(params=["native", "python"])
def core(request, monkeypatch):
    """Both cores, by turns."""
    if request.param == "python":
        monkeypatch.setattr(core_module.backend, "core", None)
    elif core_module.backend.core is None:
        pytest.skip("needs the compiled core")


def make_engine(weight, bias, contexts, k):
    """The engine of a preview of all directions."""
    layer = check_layer(weight, bias, None)
    options = BuildOptions(k=k, method="preview", rank=weight.shape[1])
    return DramEngine(build_codes(layer, contexts, options)[0], layer)


def with_digits(engine, count):
    return DramEngine(replace(engine.codes, digits=DigitCodes.of(engine.codes.blocks, count)), engine.layer)


def decoded(codes, words):
    """The rows that digits stand for, one number at a time, times their norms."""
    digits = codes.digits
    rows = np.zeros((words, codes.blocks.width))
    for at, (direction, value) in enumerate(zip(digits.directions, digits.values, strict=True)):
        group, place = divmod(at, DIGITS)
        byte = digits.codes[:, group, :, place % 4].reshape(-1)[:words].astype(np.int64)
        rows[:, direction] += value * ((byte >> 2 * (place // 4) & 3) - 1.5)
    return rows * codes.blocks.numbers[4, :words, None]


@pytest.mark.parametrize(("words", "count"), [(900, 16), (256, 48), (1001, 96), (5, 64), (900, 112)])
def test_candidates_are_the_best_by_their_digits(core, words, count):
    weight, bias, hidden = make_model(words, 30)
    engine = make_engine(weight, bias, hidden[:300], k=3)
    engine = with_digits(engine, count)
    states, codes, limit = hidden[300:307], engine.codes, min(40, words)
    rows, keys, left = np.empty((7, limit), np.int64), np.empty((7, limit, 2), np.float32), np.empty(7, np.float32)
    bad = codes.core(None).candidates(hidden=states, coarse=(0, limit), rows=rows, keys=keys, left=left)
    assert bad == -1
    z = codes.projection(states)[:, : codes.blocks.width]
    expected = z @ decoded(codes, words).T + codes.blocks.numbers[0, :words]
    expected += (states - codes.projection.mean) @ codes.projection.common[:, None]
    best = np.sort(expected, 1)[:, ::-1][:, :limit]
    found = np.take_along_axis(expected, rows, 1)
    spread = expected.std() * 0.15  # the state is rounded to signed bytes
    assert (found >= best[:, -1:] - spread).all()
    if core_module.backend.core is not None:
        np.testing.assert_allclose(keys[:, :, 1], found, atol=spread)
        assert np.abs(keys[:, :, 1] - found).mean() < spread / 5


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5])
def test_all_candidates_are_ranked_exactly(core, batch):
    weight, bias, hidden = make_model(700, 24)
    engine = make_engine(weight, bias, hidden[:300], k=5)
    engine = with_digits(engine, 32)
    states = hidden[300 : 300 + batch]
    whole = engine.preview(states, 5, 700)
    found = engine.preview(states, 5, 700, Coarse(0, 700))
    np.testing.assert_array_equal(found.indices, whole.indices)
    np.testing.assert_array_equal(found.values, whole.values)
    some = engine.preview(states, 5, 60, Coarse(0, 60))
    assert (some.indices == whole.indices).mean() > 0.8


def test_more_digits_come_nearer():
    weight, bias, hidden = make_model(900, 32)
    engine = make_engine(weight, bias, hidden[:300], k=5)
    blocks = engine.codes.blocks
    signed = (blocks.codes ^ 128).view(np.int8).transpose(0, 2, 1, 3).reshape(-1, 32)[:900]
    rows = signed * blocks.numbers[1, :900, None]
    errors = []
    for count in (16, 32, 48):
        codes = with_digits(engine, count).codes
        assert codes.digits.count == count
        errors.append(np.square(rows - decoded(codes, 900)).sum() / np.square(rows).sum())
    assert errors[0] < 0.1
    assert errors[1] < errors[0] / 4
    assert errors[2] < errors[1] / 4


def test_rows_of_zeros_have_digits(core):
    rng = np.random.default_rng(0)
    weight = np.zeros((300, 20), np.float32)
    weight[:100, :3] = rng.normal(size=(100, 3))
    hidden = rng.normal(size=(400, 20)).astype(np.float32)
    engine = make_engine(weight, None, hidden, k=2)
    engine = with_digits(engine, 80)
    found = engine.preview(hidden[:9], 2, 100, Coarse(0, 100))
    np.testing.assert_allclose(found.values, engine.preview(hidden[:9], 2, 300).values)


def test_digits_without_their_candidates_are_refused():
    if core_module.backend.core is None:
        pytest.skip("needs the compiled core")
    weight, bias, hidden = make_model(300, 24)
    engine = make_engine(weight, bias, hidden[:300], k=5)
    with pytest.raises(ValueError, match="digits"):
        engine.preview(hidden[:1], 5, 20, Coarse(0, 20))
    with pytest.raises(ValueError, match="same width by row"):
        with_digits(engine, 32).preview(hidden[:1], 5, 20, Coarse(0, 50))
    with pytest.raises(ValueError, match="survivors"):
        with_digits(engine, 32).preview(hidden[:1], 5, 20, Coarse(0, 10))


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_survivors_are_estimated_again_by_all_directions(core, batch):
    weight, bias, hidden = make_model(3001, 24)
    engine = with_digits(make_engine(weight, bias, hidden[:300], k=5), 16)
    states, rows = hidden[300 : 300 + batch], RowCodes.of(engine.codes.blocks, 3001)
    both = DramEngine(replace(engine.codes, rows=rows), engine.layer)
    by_bytes, by_digits = both.candidates(states, 3001), both.candidates(states, 400, Coarse(0, 400))
    found = both.candidates(states, 30, Coarse(0, 400))
    for order, left, chosen in zip(by_bytes, by_digits, found, strict=True):
        np.testing.assert_array_equal(chosen, order[np.isin(order, left)][:30])
    answers = both.preview(states, 5, 30, Coarse(0, 400))
    assert all(np.isin(own, chosen).all() for own, chosen in zip(answers.indices, found, strict=True))
    assert (answers.indices[:, 0] == (states @ weight.T + bias).argmax(1)).all()


@pytest.mark.parametrize("largest", ["first", "sampled", "spread", "one allowed chunk"])
def test_survivors_are_the_best_wherever_they_lie(largest):
    """A scan of one chunk in 16 tells where survivors begin; it must not decide who they are."""
    rng = np.random.default_rng(1)
    words, limit = 256 * 37 + 5, 300
    weight, bias = rng.normal(size=(words, 16)).astype(np.float32), np.zeros(words, np.float32)
    chunk = np.arange(words) // 256
    if largest != "spread":
        bias[chunk % 16 == 0 if largest == "sampled" else chunk == 0] = 20
    hidden = rng.normal(size=(300, 16)).astype(np.float32)
    engine = with_digits(make_engine(weight, bias, hidden, k=5), 32)
    whole = engine.candidates(hidden[:6], words - 1, Coarse(0, words - 1))
    allowed = None
    if largest == "one allowed chunk":
        allowed = check_allowed(np.arange(256, 512), 6, words)
        found = engine.preview(hidden[:6], 5, limit, Coarse(0, limit), allowed)
        exact = np.where(chunk == 1, hidden[:6] @ weight.T + bias, -np.inf)
        np.testing.assert_array_equal(found.indices, np.argsort(-exact, 1, kind="stable")[:, :5])
        return
    np.testing.assert_array_equal(engine.candidates(hidden[:6], limit, Coarse(0, limit)), whole[:, :limit])


@pytest.fixture(params=[48])
def index(request, monkeypatch):
    """An index whose build took digits, its layer, and states."""
    monkeypatch.setattr(build, "_DIGITS_LEAST", 0)
    monkeypatch.setattr(build, "_SAFE_DIGITS", 0.9)
    monkeypatch.setattr(build, "_DIGIT_SHARES", (1.0, 2.0))
    monkeypatch.setattr(calibrate, "_LOOKED_AT", 1)
    weight, bias, hidden = make_model(3000, request.param)
    made = LogitIndex.build(weight, bias, contexts=hidden[:2000], k=5, precision=0.9, method="preview", rank=48)
    return made, weight, bias, hidden[2000:2100]


def truth(weight, bias, states, k):
    logits = states @ weight.T + bias
    return np.sort(logits, 1)[:, ::-1][:, :k]


def test_a_build_takes_digits_that_are_precise(index, tmp_path):
    made, weight, bias, states = index
    assert made.settings.digit_survivors >= made.settings.digit_limit >= 48
    found = made.topk(states, 5)
    assert (found.values >= truth(weight, bias, states, 5)[:, -1:] - 1e-3).mean() > 0.97
    made.save(tmp_path / "saved")
    opened = LogitIndex.open(tmp_path / "saved")
    again = opened.topk(states, 5)
    np.testing.assert_array_equal(again.indices, found.indices)
    np.testing.assert_array_equal(again.values, found.values)
    certified = made.topk(states, 5, certify=True)
    assert certified.proven is not None
    exact = truth(weight, bias, states, 5)
    np.testing.assert_allclose(certified.values[certified.proven], exact[certified.proven], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("index", [400], indirect=True)
def test_rows_on_ssd_are_read_for_signed_bytes(index, tmp_path):
    made, _, _, states = index
    made.save(tmp_path / "saved")
    with pytest.raises(Exception, match="bytes are enough") as refused:
        LogitIndex.open(tmp_path / "saved", dram=1000)
    least = next(int(word) for word in str(refused.value).split() if word.isdigit())
    stored = LogitIndex.open(tmp_path / "saved", dram=least)
    assert stored.memory_bytes <= least
    assert not stored.stats()["rows_in_dram"]
    assert stored.topk(states, 5).indices.shape == (100, 5)
    stored.close()


def test_allowed_words_come_by_digits(index):
    made, weight, bias, states = index
    allowed = np.zeros(3000, bool)
    allowed[::2] = True
    found = made.topk(states, 5, allowed=allowed)
    assert (found.indices % 2 == 0).all()
    logits = np.where(allowed, states @ weight.T + bias, -np.inf)
    assert (found.values >= np.sort(logits, 1)[:, -5:-4] - 1e-3).mean() > 0.97


def test_refreshed_digits_are_those_of_the_new_rows(index, tmp_path):
    made, weight, bias, states = index
    changed = weight.copy()
    changed[[3, 700, 2999]] *= -1.5
    assert made.refresh(changed, bias) == 3
    made.save(tmp_path / "saved")
    codes = open_index(tmp_path / "saved", None, "read")[0].codes
    np.testing.assert_array_equal(codes.digits.codes, codes.digits.again(codes.blocks, np.arange(3000)).codes)
    found = made.topk(states, 5)
    assert (found.values >= truth(changed, bias, states, 5)[:, -1:] - 1e-3).mean() > 0.95


def test_digits_that_are_not_precise_are_left_out(monkeypatch):
    monkeypatch.setattr(build, "_DIGITS_LEAST", 0)
    monkeypatch.setattr(build, "_DIGIT_SHARES", (0.1,))
    rng = np.random.default_rng(0)
    weight, hidden = (rng.normal(size=(many, 64)).astype(np.float32) for many in (4000, 400))
    made = LogitIndex.build(weight, contexts=hidden, k=5, precision=0.99, method="preview", rank=64)
    assert made.settings.digit_survivors == 0
    assert made.stats()["precision_preview"] > 0.99


def test_digits_find_the_first_word_of_contexts_that_no_build_saw(monkeypatch):
    """The fewest candidates that suffice for the contexts held out miss four words in a thousand here."""
    monkeypatch.setattr(build, "_DIGITS_LEAST", 0)
    monkeypatch.setattr(build, "_DIGIT_SHARES", (0.5, 1.0))
    monkeypatch.setattr(calibrate, "_LOOKED_AT", 1)  # a scan of so few words never pays
    rng = np.random.default_rng(3)
    weight = (rng.normal(size=(3000, 32)) * rng.lognormal(0, 0.35, size=(3000, 1))).astype(np.float32)
    hidden = rng.normal(size=(8600, 32)).astype(np.float32)
    made = LogitIndex.build(weight, contexts=hidden[:2600], k=1, precision=0.99, method="preview", rank=32)
    assert made.settings.digit_survivors
    states = hidden[2600:]
    assert (made.topk(states, 1).values >= truth(weight, 0, states, 1) - 1e-3).mean() >= 0.999


def test_a_limit_without_digits_is_damage(index, tmp_path):
    made, weight, bias, _ = index
    made.save(tmp_path / "saved")
    codes = open_index(tmp_path / "saved", None, "read")[0].codes
    for part in ("digits", "rows"):
        engine = DramEngine(replace(codes, **{part: None}), check_layer(weight, bias, None))
        save_index(tmp_path / part, engine, made.settings, "preview", made.digest)
        with pytest.raises(CorruptionError, match="do not fit"):
            LogitIndex.open(tmp_path / part)


@pytest.mark.parametrize("k", [1, 10])
def test_previews_find_declared_shares_for_contexts_that_no_build_saw(k):
    """Rows of unlike norms, whose words miss by luck of the contexts held out."""
    shares = []
    for seed in (3, 21, 40):
        rng = np.random.default_rng(seed)
        weight = (rng.normal(size=(3000, 64)) * rng.lognormal(0, 0.35, size=(3000, 1))).astype(np.float32)
        hidden = rng.normal(size=(4600, 64)).astype(np.float32)
        made = LogitIndex.build(weight, contexts=hidden[:2600], k=k, precision=0.99, method="preview")
        states = hidden[2600:]
        found, exact = made.topk(states, k).values, truth(weight, 0, states, k)
        shares.append(min((found >= exact[:, -1:] - 1e-3).mean(), (found[:, 0] >= exact[:, 0] - 1e-3).mean()))
    assert min(shares) >= 0.99
