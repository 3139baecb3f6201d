"""What the decoder promises, at the edges: numbers far out, cancellation, many wanted, NumPy's own scalars."""

import importlib

import numpy as np
import pytest

from memhier import backend
from memhier.ann.decoder import FGD, LogitIndex
from memhier.ann.decoder.calibration import calibrate


def make_layer(words, dimension, seed=0):
    """A layer and contexts with a few strong directions, as models have."""
    rng = np.random.default_rng(seed)
    weight = (rng.normal(size=(words, dimension)) + rng.normal(size=dimension)).astype(np.float32)
    hidden = (rng.normal(size=(1000, dimension)) * 4 / np.arange(1, dimension + 1)).astype(np.float32)
    return weight, hidden


@pytest.fixture(params=["native", "python"])
def core(request, monkeypatch):
    """Both cores, by turns."""
    if request.param == "python":
        monkeypatch.setattr(backend, "core", None)
    elif backend.core is None:
        pytest.skip("needs the compiled core")


def test_a_bias_below_the_padding_of_the_codes_is_refused():
    weight, _ = make_layer(200, 8)
    bias = np.zeros(200)
    bias[7] = np.finfo(np.float32).min  # often meant as "never"
    with pytest.raises(ValueError, match=r"bias\[7\]=-3\.4.*: expected finite numbers up to 1e\+15"):
        LogitIndex.build(weight, bias, k=5)


@pytest.mark.parametrize("size", [1e38, 1e300])
def test_hidden_states_whose_logits_would_overflow_are_refused(core, size):
    weight, hidden = make_layer(400, 8)
    index = LogitIndex.build(weight, contexts=hidden[:300], k=5, method="graph")
    far = hidden[:3].astype(np.float64)
    far[1, 6] = size
    asks = [lambda states, method=method: index.topk(states, method=method) for method in ("graph", "preview", "full")]
    for ask in (*asks, index.partition, lambda states: index.topk(states, certify=True)):
        with pytest.raises(ValueError, match=r"hidden\[1, 6\]=(9\.99\d*e\+37|inf): expected finite numbers up to"):
            ask(far)


@pytest.mark.parametrize("exact", [False, True])
def test_bounds_of_log_probabilities_hold_where_large_terms_cancel(exact):
    weight, hidden = make_layer(120, 64)
    queries = hidden[:40]
    weight[7] *= 1e5
    weight[7] -= (weight[7] @ queries[0]) / (queries[0] @ queries[0]) * queries[0]
    states = np.repeat(queries[:1], 40, axis=0) * np.linspace(0.5, 1.5, 40, dtype=np.float32)[:, None]
    for bias_of_it in (-20.0, 20.0):  # the word that is asked for is unlikely, or nearly certain
        bias = np.zeros(120, np.float32)
        bias[7] = bias_of_it
        index = LogitIndex.build(weight, bias, k=5)
        logits = states.astype(np.float64) @ weight.T.astype(np.float64) + bias
        z = np.logaddexp.reduce(logits, axis=1)
        for word in (7, 3):
            found = index.log_prob(states, np.full(40, word), exact=exact)
            right = logits[:, word] - z
            assert (found.low <= right).all()
            assert (right <= found.high).all()


def test_many_wanted_reach_the_precision_too():
    weight, hidden = make_layer(3000, 40)
    index = LogitIndex.build(weight, contexts=hidden[:600], k=700, precision=0.999, method="preview")
    logits = hidden[600:] @ weight.T
    kth = np.sort(logits, 1)[:, -700]
    found = index.topk(hidden[600:])
    assert (found.values >= kth[:, None] - 1e-3).mean() >= 0.999


def test_more_are_wanted_than_a_walk_for_far_contexts_would_list(monkeypatch):
    monkeypatch.setattr(calibrate, "scan_cost", lambda *_: np.inf)
    weight, hidden = make_layer(1500, 16)
    index = LogitIndex.build(weight, contexts=hidden[:600], k=450, precision=0.5, method="graph")
    assert index.topk(hidden[600:610]).indices.shape == (10, 450)
    assert "far" in index.settings.reached


def test_numbers_of_numpy_are_numbers(tmp_path):
    weight, hidden = make_layer(300, 8)
    index = LogitIndex.build(
        weight, contexts=hidden, k=np.int64(4), precision=np.float32(0.9), rank=np.int32(8), seed=np.int16(3)
    )
    index.save(tmp_path / "index")
    again = LogitIndex.open(tmp_path / "index")
    assert again.settings == index.settings
    assert again.topk(hidden[:2], np.int64(3)).indices.shape == (2, 3)


def test_a_way_that_is_not_there_is_refused_with_a_certificate_too():
    weight, hidden = make_layer(300, 8)
    index = LogitIndex.build(weight, k=5)
    with pytest.raises(ValueError, match="method='other': expected one of auto, graph"):
        index.topk(hidden[:2], certify=True, method="other")


def test_owned_rows_are_counted(tmp_path):
    weight, hidden = make_layer(3000, 40)
    shared = LogitIndex.build(weight, contexts=hidden, k=5, method="preview")
    assert shared.memory_bytes < weight.nbytes
    copied = LogitIndex.build(np.asfortranarray(weight), contexts=hidden, k=5, method="preview")
    shared.save(tmp_path / "index")
    for index in (copied, LogitIndex.open(tmp_path / "index")):
        assert index.memory_bytes >= shared.memory_bytes + weight.nbytes


@pytest.mark.parametrize("module", ["memhier.ann", "memhier.ann.decoder"])
def test_dir_shows_names_that_are_loaded_on_use(module):
    package = importlib.import_module(module)
    assert set(package.__all__) <= set(dir(package))


def test_the_module_for_transformers_has_its_short_name_too():
    pytest.importorskip("torch")
    short = importlib.import_module("memhier.ann.huggingface")
    assert short.accelerate is importlib.import_module("memhier.ann.decoder.module.huggingface").accelerate
    assert set(short.__all__) == {"AcceleratedHead", "accelerate", "rescore", "undo"}


def test_fgd_takes_numbers_of_numpy():
    weight, hidden = make_layer(300, 8)
    fgd = FGD(weight, m=np.int64(8), ef_construction=np.int32(40))
    np.testing.assert_array_equal(fgd.topk(hidden[:5], np.int64(3)).indices, fgd.topk(hidden[:5], 3).indices)
