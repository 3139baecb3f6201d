"""Precision in use: calls answered again by the full product, drawn by the seed, counted, and a warning if too few."""

import copy
import pickle
import threading
import warnings
from itertools import pairwise

import numpy as np
import pytest

from memhier.ann.decoder import LogitIndex
from memhier.ann.decoder.answers import TopK
from memhier.ann.decoder.calibration.audit import PrecisionAudit
from memhier.ann.decoder.calibration.walk_audit import WalkAudit
from memhier.errors import RecallWarning

WORDS, DIMENSION, K = 3000, 96, 5


@pytest.fixture(scope="module")
def model():
    """A layer whose rows are large where its contexts are, and 800 contexts."""
    rng = np.random.default_rng(0)
    turn = np.linalg.qr(rng.normal(size=(DIMENSION, DIMENSION)))[0]
    weight = (rng.normal(size=(WORDS, DIMENSION)) / np.sqrt(np.arange(1, DIMENSION + 1))) @ turn
    contexts = (rng.normal(size=(800, DIMENSION)) * 4 / np.arange(1, DIMENSION + 1) ** 1.2) @ turn
    contexts += 0.02 * rng.normal(size=contexts.shape)
    return weight.astype(np.float32), contexts.astype(np.float32)


def build(model, **options):
    weight, contexts = model
    return LogitIndex.build(weight, contexts=contexts[:600], k=K, method="graph", **options)


@pytest.fixture(scope="module")
def audited(model):
    return build(model, audit=1.0)


def precision(weight, states, values):
    logits = states.astype(np.float64) @ weight.T.astype(np.float64)
    return float((values >= np.sort(logits, 1)[:, -K:][:, :1] - 1e-4).mean())


def test_every_call_is_audited_with_a_share_of_one(model, audited):
    weight, contexts = model
    index = copy.deepcopy(audited)
    assert index.stats()["audit"] == {"share": 1.0, "calls": 0}
    found = [index.topk(state).values for state in contexts[600:700]]
    audit = index.stats()["audit"]
    assert audit["calls"] == 100
    right = precision(weight, contexts[600:700], np.concatenate(found))
    assert audit["precision"] == pytest.approx(right, abs=1e-9)
    assert audit["precision_low"] <= right <= audit["precision_high"]


def test_the_seed_draws_the_calls():
    audits = [PrecisionAudit(0.1, seed, 0.99) for seed in (7, 7, 8)]
    calls = [[audit.draw() for _ in range(10_000)] for audit in audits]
    assert calls[0] == calls[1] != calls[2]
    assert 900 < sum(calls[0]) < 1100
    assert not any(PrecisionAudit(0.0, 0, 0.99).draw() for _ in range(100))


def test_exact_answers_are_not_audited(model, audited):
    _, contexts = model
    index = copy.deepcopy(audited)
    index.topk(contexts[:3], method="full")
    index.topk(contexts[:3], allowed=[1, 2, 3])
    assert index.stats()["audit"]["calls"] == 0
    index.topk(contexts[:3], allowed=np.arange(2500))
    index.topk(contexts[:3], certify=True)
    index.topk(contexts[:40], 2)
    index.topk(contexts[:0])
    assert index.stats()["audit"]["calls"] == 3
    assert index.stats()["audit"]["precision"] > 0.98


def kinds_of(contexts, seed=3):
    """Contexts of five kinds: as learned, larger, with noise, numbers in another order, and Gaussian."""
    rng, asked = np.random.default_rng(seed), contexts[600:]
    asked = np.concatenate([asked, asked[::-1]])[:300]
    return {
        "real": asked,
        "larger": 3 * asked,
        "noisy": asked + 0.5 * contexts.std() * rng.normal(size=asked.shape),
        "shuffled": asked[:, rng.permutation(asked.shape[1])],
        "gaussian": contexts.std() * rng.normal(size=asked.shape),
    }


@pytest.mark.parametrize("kind", ["real", "larger", "noisy", "shuffled", "gaussian"])
def test_precision_is_kept_or_a_warning_says_how_much_it_is(model, kind):
    weight, contexts = model
    index = build(model)
    asked = kinds_of(contexts)[kind].astype(np.float32)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = np.concatenate([index.topk(state).values for state in asked])
    reached, audit = precision(weight, asked, found), index.stats()["audit"]
    told = [each for each in said if issubclass(each.category, RecallWarning)]
    unlike = [str(each.message) for each in said if "unlike the contexts" in str(each.message)]
    assert all("15 calls answered again by the full product put the precision" in each for each in unlike)
    assert reached >= 0.99 or ((told or unlike) and audit["precision_low"] <= reached <= audit["precision_high"])
    assert len(told) <= 1
    assert audit["calls"] <= 70, "calls are answered again without a share only as states are compared"
    if kind == "real":
        assert not said
        assert audit["calls"] == 0
    if told:
        assert "below the declared 0.99" in str(told[0].message)
        assert told[0].filename == __file__


def clustered(spectrum):
    """A layer, and 3,200 contexts in clusters: the rows' and the contexts' spectra are `spectrum` to these powers."""
    rng, (of_rows, of_contexts) = np.random.default_rng(3), spectrum
    turn, at = np.linalg.qr(rng.normal(size=(DIMENSION, DIMENSION)))[0], np.arange(1, DIMENSION + 1)
    weight = (rng.normal(size=(6000, DIMENSION)) / at**of_rows) @ turn
    states = 2.5 * rng.normal(size=(60, DIMENSION))[rng.integers(0, 60, 3200)] + rng.normal(size=(3200, DIMENSION))
    return weight.astype(np.float32), ((states / at**of_contexts) @ turn).astype(np.float32)


@pytest.fixture(scope="module", params=[(0.5, 0.6), (0.2, 0.8)])
def clusters(request):
    return clustered(request.param)


@pytest.fixture(scope="module", params=["graph", "screen"])
def walking(clusters, request):
    weight, states = clusters
    return LogitIndex.build(weight, contexts=states[:2800], k=K, method=request.param)


@pytest.mark.parametrize("kind", ["real", "wide", "means of two"])
def test_no_walk_finds_less_than_declared_in_silence(clusters, walking, kind):
    """A wide cloud has the mean and covariance of clustered contexts, and their norms."""
    weight, states = clusters
    rng = np.random.default_rng(5)
    wide = states.mean(0) + rng.normal(size=(400, DIMENSION)) @ np.linalg.cholesky(np.cov(states.T)).T
    pairs = states[rng.integers(0, 2800, (400, 2))].mean(1)
    asked = {"real": states[2800:], "wide": wide, "means of two": pairs}[kind].astype(np.float32)
    index = copy.copy(walking)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = np.concatenate([index.topk(state).values for state in asked])
    reached, compared = precision(weight, asked, found), index.stats()["walks_compared"]
    told = [str(each.message) for each in said if "walks answered again by the preview" in str(each.message)]
    assert len(told) <= 1
    assert reached >= 0.985 or told
    if told:
        assert compared["precision_low"] <= reached <= compared["precision_high"] < 0.99
    if kind == "real":
        assert not said
        assert compared["calls"] <= 128


def test_few_states_of_a_batch_are_compared_and_settle_it_as_soon(clusters, walking, monkeypatch):
    _, states = clusters
    index, asked = copy.copy(walking), []
    monkeypatch.setattr(WalkAudit, "note", lambda self, found, better, slack: asked.append(len(found.values)))
    for count in (1, 3, 4, 9, 200):
        index.topk(states[2800 : 2800 + count])
    assert asked == [1, 3, 4, 4, 4]
    monkeypatch.undo()
    four, audit = TopK(np.ones((4, 2), np.float32), np.zeros((4, 2), np.int64)), WalkAudit(0.99)
    due = [audit.due() and audit.note(four, four, np.zeros(4)) is None for _ in range(32)]
    assert sum(due[:16]) == 16
    assert sum(due[16:]) == 4


def test_other_calls_in_between_take_no_comparison_from_walks(clusters, walking):
    _, states = clusters
    index = copy.copy(walking)
    index.topk(states[:64], certify=True)
    for state in states[2800:2900]:
        index.topk(state, certify=True)
        index.topk(state)
    assert index.stats()["walks_compared"]["calls"] >= 64


def test_walks_over_a_refreshed_layer_are_compared_again(clusters, walking):
    weight, states = clusters
    other = np.random.default_rng(8).normal(size=weight.shape).astype(np.float32)
    index = LogitIndex.build(weight, contexts=states[:2800], k=K, method=walking.way(1))
    for state in states[2800:2900]:
        index.topk(state)
    before = index.stats()["walks_compared"]
    assert not index.refresh(weight)
    assert index.stats()["walks_compared"] == before
    index.refresh(other)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = np.concatenate([index.topk(state).values for state in states[2800:]])
    assert precision(other, states[2800:], found) >= 0.985 or said
    assert index.stats()["walks_compared"]["calls"] >= 64


def test_walks_are_compared_the_more_often_the_more_they_miss():
    good, short = (
        TopK(np.ones((1, 10), np.float32) * (np.arange(10) < right), np.arange(10)[None]) for right in (10, 7)
    )
    audit = WalkAudit(0.99)

    def compared(found, calls):
        due = [audit.due() and audit.note(found, good, np.zeros(1)) is None for _ in range(calls)]
        return sum(due[:64]), sum(due[64:])

    assert compared(good, 10_000) == (64, (10_000 - 64) // 4)
    with pytest.warns(
        RecallWarning, match="answered again by the preview put the precision of this decoder at"
    ) as said:
        compared(short, 20_000)
    assert len(said) == 1
    assert 512 < audit.stats()["calls"] <= 64 + 512 + 30_000 // 4
    assert audit.stats()["precision_high"] < 0.99
    assert copy.copy(audit).stats() == {"calls": 0}


def test_a_shortfall_is_told_once_and_names_the_estimate():
    audit = PrecisionAudit(1.0, 0, 0.99)
    exact = TopK(np.ones((1, 4), np.float32), np.arange(4)[None])
    short = TopK(np.array([[1, 1, 0.5, 0.2]], np.float32), np.arange(4)[None])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(50):
            audit.note(short, exact, np.zeros(1))
    assert len(said) == 1
    assert "0.5000" in str(said[0].message)
    assert audit.stats()["precision"] == 0.5
    assert audit.stats()["precision_high"] < 0.99


def test_the_estimate_follows_recent_calls():
    audit = PrecisionAudit(1.0, 0, 0.1)
    exact = TopK(np.ones((1, 1), np.float32), np.zeros((1, 1), np.int64))
    missed = TopK(np.zeros((1, 1), np.float32), np.zeros((1, 1), np.int64))
    for found, times in ((exact, 500), (missed, 700), (exact, 1024)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(times):
                audit.note(found, exact, np.zeros(1))
    assert audit.stats()["calls"] == 2224
    assert audit.stats()["precision"] == 1


def test_threads_lose_no_count():
    audit = PrecisionAudit(0.5, 1, 0.5)
    exact = TopK(np.ones((1, 1), np.float32), np.zeros((1, 1), np.int64))

    def work():
        for _ in range(2000):
            if audit.draw():
                audit.note(exact, exact, np.zeros(1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    alone = PrecisionAudit(0.5, 1, 0.5)
    assert audit.stats()["calls"] == sum(alone.draw() for _ in range(8000))


def test_copies_and_opened_indexes_count_from_zero(model, audited, tmp_path):
    _, contexts = model
    audited.topk(contexts[:2])
    for again in (copy.copy(audited), pickle.loads(pickle.dumps(audited))):
        assert again.stats()["audit"] == {"share": 1.0, "calls": 0}
    audited.save(tmp_path / "index")
    assert LogitIndex.open(tmp_path / "index").stats()["audit"] == {"share": 0.0, "calls": 0}
    opened = LogitIndex.open(tmp_path / "index", audit=0.5, seed=3)
    for state in contexts[600:640]:
        opened.topk(state)
    assert 5 < opened.stats()["audit"]["calls"] < 35
    assert opened.stats()["audit"]["share"] == 0.5


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan"), "all", True])
def test_a_share_that_is_none_is_named(model, share):
    weight, contexts = model
    with pytest.raises(ValueError, match="audit="):
        LogitIndex.build(weight, contexts=contexts[:600], k=K, audit=share)


def test_audits_hold_the_interval_for_a_known_precision():
    rng = np.random.default_rng(0)
    exact = TopK(np.ones((1, 10), np.float32), np.arange(10)[None])
    widths = []
    for calls in (30, 300, 1000):
        audit = PrecisionAudit(1.0, 0, 0.5)
        for _ in range(calls):
            values = (rng.random((1, 10)) < 0.95).astype(np.float32)
            audit.note(TopK(values, exact.indices), exact, np.zeros(1))
        stats = audit.stats()
        assert stats["precision_low"] <= 0.95 <= stats["precision_high"]
        widths.append(stats["precision_high"] - stats["precision_low"])
    assert all(narrow < wide for wide, narrow in pairwise(widths))
