"""A decoder that is asked with hidden states unlike those of its build says so, once, and counts them."""

import copy
import warnings
from dataclasses import asdict

import numpy as np
import pytest

from memhier.ann.decoder import LogitIndex
from memhier.ann.decoder.calibration.settings import Settings

WORDS, DIMENSION = 500, 96


TURN = np.linalg.qr(np.random.default_rng(1).normal(size=(DIMENSION, DIMENSION)))[0]


def make_layer():
    """Rows that are large where the states of a model are, as training makes them."""
    rng = np.random.default_rng(0)
    weight = (rng.normal(size=(WORDS, DIMENSION)) / np.sqrt(np.arange(1, DIMENSION + 1))) @ TURN
    return weight.astype(np.float32), rng


def make_real(rng, count, normalised=False):
    """States as models have them: a common part, and a few strong directions; normalised as after a LayerNorm."""
    parts = rng.normal(size=(count, DIMENSION)) * 4 / np.arange(1, DIMENSION + 1) ** 0.9
    parts[:, 3] += 2
    states = parts @ TURN
    if normalised:
        states = (states - states.mean(1, keepdims=True)) / states.std(1, keepdims=True)
    return states.astype(np.float32)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("scale", [0.1, 1.0, "theirs"])
def test_a_decoder_of_made_up_contexts_says_so_at_use(normalised, scale):
    weight, rng = make_layer()
    real = make_real(rng, 200, normalised)
    size = np.sqrt(np.square(real).mean()) if scale == "theirs" else scale
    made_up = rng.normal(size=(1000, DIMENSION)).astype(np.float32) * np.float32(size)
    index = LogitIndex.build(weight, contexts=made_up, k=5, method="preview")
    index.topk(made_up[:50])
    index = copy.copy(index)
    with pytest.warns(UserWarning, match="of 16 hidden states are unlike .* build it again with contexts= "):
        index.topk(real)
    index.topk(real)  # once
    stats = index.stats()
    assert stats["contexts_checked"] == 32
    assert stats["contexts_unlike"] > 16


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("ask", ["topk", "distribution", "partition", "certify", "one by one"])
def test_contexts_like_those_of_the_build_are_no_news(normalised, ask):
    weight, rng = make_layer()
    real = make_real(rng, 1200, normalised)
    index = LogitIndex.build(weight, contexts=real[:600], k=5, method="preview")
    asked = real[600:]
    if ask == "one by one":
        for state in asked[:200]:
            index.topk(state)
    elif ask == "certify":
        index.topk(asked, certify=True)
    else:
        getattr(index, ask)(asked)
    stats = index.stats()
    assert stats["contexts_checked"] in (range(64 + 1, 64 + 8) if ask == "one by one" else (16,))
    assert stats["contexts_unlike"] <= 2


def test_it_is_said_of_states_that_come_one_by_one():
    weight, rng = make_layer()
    real = make_real(rng, 100)
    index = LogitIndex.build(weight, contexts=rng.normal(size=(500, DIMENSION)).astype(np.float32) * 9, k=5)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for state in real:
            index.topk(state, method="preview")
    assert len(said) == 1
    assert said[0].filename == __file__


def test_contexts_change_in_the_middle_of_a_long_run():
    weight, rng = make_layer()
    real = make_real(rng, 800)
    index = LogitIndex.build(weight, contexts=real[:600], k=5, method="preview")
    for state in np.tile(real[600:], (3, 1)):
        index.topk(state)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(64 * 4):
            index.topk(-9 * real[:16])
    assert len(said) == 1


@pytest.mark.parametrize("every", [2, 5])
@pytest.mark.parametrize("ask", ["topk", "partition"])
def test_calls_of_a_kind_that_come_in_turn_are_looked_at_too(every, ask):
    weight, rng = make_layer()
    real = make_real(rng, 700)
    index = LogitIndex.build(weight, contexts=real[:600], k=5, method="preview")
    for state in real[600:664]:
        getattr(index, ask)(state)
    own = [copy.deepcopy(index) for _ in range(every)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, one in enumerate(own):
            for call in range(1500):
                getattr(one, ask)(-9 * real[:1] if call % every == number else real[600 + call % 64])
    assert all(one.stats()["contexts_unlike"] > 0 for one in own)


def test_without_contexts_nothing_is_compared_and_answers_of_the_full_product_need_none():
    weight, rng = make_layer()
    real = make_real(rng, 100)
    index = LogitIndex.build(weight, k=5)
    index.topk(real * 1e3)
    assert index.stats()["contexts_checked"] == 0
    index = LogitIndex.build(weight, contexts=rng.normal(size=(500, DIMENSION)).astype(np.float32), k=5, method="full")
    index.topk(real * 1e3)
    assert index.stats()["contexts_checked"] == 0


def test_the_ranges_are_stored_and_decoders_of_before_have_none(tmp_path):
    weight, rng = make_layer()
    index = LogitIndex.build(weight, contexts=make_real(rng, 300), k=5, method="preview")
    index.save(tmp_path / "decoder")
    again = LogitIndex.open(tmp_path / "decoder")
    assert again.settings == index.settings
    assert len(again.settings.ranges) == 4
    with pytest.warns(UserWarning, match="hidden states are unlike"):
        again.topk(make_real(rng, 20) * 50)
    before = asdict(index.settings)
    del before["ranges"]
    assert Settings.from_json(before).ranges == ()
