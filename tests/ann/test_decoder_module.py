"""TopKSoftmax in the place of an output layer: values, shapes, sampling, types, tied weights, errors."""

import copy
import gc
import io
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from memhier import backend  # noqa: E402
from memhier.ann import LogitIndex, SparseLogits, TopKSoftmax  # noqa: E402
from memhier.ann.decoder.calibration.cost import full_costs_less, proof_costs_less  # noqa: E402


def make_head(words=600, dimension=24, *, bias=True, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(dimension, words, bias=bias)
    head.weight.data = torch.randn(words, dimension, generator=generator)
    if bias:
        head.bias.data = torch.randn(words, generator=generator)
    strength = 3 / torch.arange(1, dimension + 1) ** 0.7
    hidden = torch.randn(400, dimension, generator=generator) * strength
    return head.to(dtype), hidden.to(dtype)


@pytest.fixture(scope="module")
def built():
    head, hidden = make_head()
    return head, hidden[300:], TopKSoftmax.from_linear(head, k=10, contexts=hidden[:300], method="preview")


def test_topk_is_that_of_the_layer(built):
    head, hidden, decoder = built
    values, indices = decoder.topk(hidden)
    right = torch.topk(head(hidden), 10)
    torch.testing.assert_close(values, right.values, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(indices, right.indices)
    sure, same, proven = decoder.certified_topk(hidden, 3)
    torch.testing.assert_close(sure, right.values[:, :3], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(same, right.indices[:, :3])
    assert proven.float().mean() > 0.8


def test_leading_shapes_are_kept(built):
    _, hidden, decoder = built
    values, indices = decoder.topk(hidden.reshape(4, 25, 24))
    assert values.shape == indices.shape == (4, 25, 10)
    torch.testing.assert_close(indices.reshape(100, 10), decoder.topk(hidden)[1])
    assert decoder.topk(hidden[0])[0].shape == (10,)
    assert decoder.topk(hidden[:0])[0].shape == (0, 10)


@pytest.mark.parametrize("method", ["preview", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_every_type_with_and_without_bias(dtype, bias, method):
    head, hidden = make_head(bias=bias, dtype=dtype)
    decoder = TopKSoftmax.from_linear(head, k=5, contexts=hidden[:300], method=method)
    values, indices = decoder.topk(hidden[300:])
    logits = hidden[300:].double() @ head.weight.double().T + (head.bias.double() if bias else 0)
    kth = torch.topk(logits, 5).values[:, -1:]
    slack = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    assert (logits.gather(1, indices) >= kth - slack).all()
    torch.testing.assert_close(values.double(), logits.gather(1, indices), rtol=0, atol=slack)


def test_forward_is_dense_or_sparse(built):
    head, hidden, decoder = built
    logits = decoder(hidden)
    assert logits.shape == (100, 600)
    assert (torch.isfinite(logits).sum(1) == 10).all()
    torch.testing.assert_close(logits.argmax(1), head(hidden).argmax(1))
    sparse = TopKSoftmax(decoder.index, head.weight.detach(), head.bias.detach(), "sparse")(hidden)
    assert isinstance(sparse, SparseLogits)
    torch.testing.assert_close(logits.gather(1, sparse.indices), sparse.values)


def test_weights_are_shared_not_copied():
    head, hidden = make_head()
    decoder = TopKSoftmax.from_linear(head, contexts=hidden, method="preview")
    assert decoder.index.layer.weight.ctypes.data == head.weight.data_ptr()
    embedding = torch.nn.Embedding(600, 24)
    head.weight = embedding.weight  # tied
    tied = TopKSoftmax.from_linear(head, contexts=hidden, method="preview")
    assert tied.index.layer.weight.ctypes.data == embedding.weight.data_ptr()


def test_log_prob(built):
    head, hidden, decoder = built
    targets = torch.arange(100)
    right = head(hidden).double().log_softmax(1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(decoder.log_prob(hidden, targets), right, rtol=0, atol=0.02)


def test_log_probabilities_and_log_z_have_bounds(built):
    head, hidden, decoder = built
    states, targets = hidden.reshape(4, 25, 24), torch.arange(100).reshape(4, 25)
    logits = (states.double() @ head.weight.double().T + head.bias.double()).detach()
    right = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    estimate, low, high = decoder.bounded_log_prob(states, targets)
    torch.testing.assert_close(estimate, decoder.log_prob(states, targets))
    assert ((low <= right) & (right <= high)).all()
    assert ((low <= estimate) & (estimate <= high)).all()
    for temperature in (1.0, 2.0):
        z, low, high = decoder.log_partition(states, temperature)
        right = (logits / temperature).logsumexp(-1)
        assert z.shape == (4, 25)
        assert ((low <= right) & (right <= high)).all()


def frequencies(drawn, words):
    return np.bincount(drawn.numpy(), minlength=words) / len(drawn)


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.7}, {}])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_samples_follow_the_layer(built, options, temperature):
    head, hidden, decoder = built
    state = hidden[3:4].repeat(4_000, 1)
    drawn = decoder.sample(state, **options, temperature=temperature, generator=torch.Generator().manual_seed(1))
    logits = (head(hidden[3:4])[0] / temperature).double()
    if "top_k" in options:
        logits[logits < torch.topk(logits, options["top_k"]).values[-1]] = -torch.inf
    shares = logits.softmax(0)
    if "top_p" in options:
        ordered, order = shares.sort(descending=True)
        shares[order[ordered.cumsum(0) - ordered >= options["top_p"]]] = 0
        shares /= shares.sum()
    assert np.abs(frequencies(drawn, 600) - shares.detach().numpy()).max() < 0.035
    if options:
        assert shares[drawn].min() > 0


def test_sampling_is_fixed_by_its_generator(built):
    _, hidden, decoder = built
    draws = [decoder.sample(hidden, top_p=0.9, generator=torch.Generator().manual_seed(7)) for _ in range(2)]
    torch.testing.assert_close(*draws)


def test_a_layer_that_was_trained_on():
    head, hidden = make_head()
    decoder = TopKSoftmax.from_linear(head, k=5, contexts=hidden[:300], method="preview")
    assert not decoder.is_stale(head)
    with torch.no_grad():
        head.weight[50:60] *= 3
    assert decoder.is_stale(head)
    assert decoder.refresh(head) >= 10
    assert not decoder.is_stale(head)
    torch.testing.assert_close(decoder.topk(hidden[300:])[1], torch.topk(head(hidden[300:]), 5).indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_saved_and_opened(tmp_path, dtype):
    head, hidden = make_head(dtype=dtype)
    decoder = TopKSoftmax.from_linear(head, k=5, contexts=hidden[:300], method="preview")
    decoder.save(tmp_path / "decoder")
    again = TopKSoftmax.open(tmp_path / "decoder")
    torch.testing.assert_close(again.topk(hidden[300:]), decoder.topk(hidden[300:]))
    assert not again.is_stale(head)
    assert isinstance(LogitIndex.open(tmp_path / "decoder"), LogitIndex)


def test_errors_name_the_argument(built):
    _, hidden, decoder = built
    with pytest.raises(TypeError, match=r"lm_head: expected a torch.nn.Linear, got ReLU"):
        TopKSoftmax.from_linear(torch.nn.ReLU())
    with pytest.raises(TypeError, match="lm_head: expected weights of float32"):
        TopKSoftmax.from_linear(torch.nn.Linear(3, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="lies on meta"):
        TopKSoftmax.from_linear(torch.nn.Linear(3, 4, device="meta"))
    with pytest.raises(ValueError, match=r"hidden: expected shape \[n, 24\]"):
        decoder.topk(hidden[:, :20])
    with pytest.raises(TypeError, match="hidden: expected a tensor of floats"):
        decoder.topk(torch.zeros(2, 24, dtype=torch.int64))
    with pytest.raises(ValueError, match="k=601: expected 1 to 600"):
        decoder.topk(hidden, 601)
    with pytest.raises(ValueError, match="temperature=0"):
        decoder.sample(hidden, temperature=0)
    with pytest.raises(ValueError, match="temperature=1e-40: expected above 0, at least 1e-30"):
        decoder.sample(hidden, temperature=1e-40)
    with pytest.raises(ValueError, match="top_k=0: expected 1 to 600 words; None for all"):
        decoder.sample(hidden, top_k=0)
    with pytest.raises(TypeError, match=r"contexts: expected a tensor of floats, got an array of float32; torch\.from"):
        TopKSoftmax.from_linear(make_head()[0], contexts=np.zeros((100, 24), np.float32))
    with pytest.raises(ValueError, match=r"top_p=1\.2"):
        decoder.sample(hidden, top_p=1.2)
    bad = hidden.clone()
    bad[1, 2] = torch.nan
    with pytest.raises(ValueError, match=r"hidden\[1, 2\]=nan"):
        decoder.topk(bad)
    with pytest.raises(ValueError, match="output='other'"):
        TopKSoftmax(decoder.index, None, None, "other")


@pytest.mark.parametrize("method", ["full", "preview", "graph"])
def test_a_hidden_state_that_is_not_finite_is_refused_by_every_way(method):
    head, hidden = make_head()
    decoder = TopKSoftmax.from_linear(head, k=5, contexts=hidden, method=method)
    bad = hidden[:3].clone()
    bad[2, 7] = torch.inf
    for ask in (decoder.topk, decoder.certified_topk, decoder.sample, decoder):
        with pytest.raises(ValueError, match=r"hidden\[2, 7\]=inf"):
            ask(bad)
    with pytest.raises(ValueError, match="got a single number"):
        decoder.topk(torch.tensor(1.0))


def test_nothing_asked_is_answered_with_nothing(built):
    _, hidden, decoder = built
    none = hidden[:0]
    assert decoder.certified_topk(none)[2].shape == (0,)
    assert decoder.log_prob(none, torch.zeros(0, dtype=torch.int64)).shape == (0,)
    assert decoder(none).shape == (0, 600)
    for options in ({}, {"top_k": 3}, {"top_p": 0.5}):
        assert decoder.sample(none, **options).shape == (0,)


def test_copies_answer_alike_and_are_refreshed_alone(built):
    _, hidden, _ = built
    head, learned = make_head()
    decoder = TopKSoftmax.from_linear(head, k=10, contexts=learned[:300], method="graph")
    right = decoder.topk(hidden)
    buffer = io.BytesIO()
    torch.save(decoder, buffer)
    buffer.seek(0)
    pickled, copied = torch.load(buffer, weights_only=False), copy.deepcopy(decoder)
    for other in (pickled, copied):
        torch.testing.assert_close(other.topk(hidden), right)
    changed = copy.deepcopy(head)
    changed.weight.data[:300] *= 2
    copied.refresh(changed)
    assert (copied.topk(hidden)[1] == torch.topk(changed(hidden), 10).indices).float().mean() > 0.95
    torch.testing.assert_close(decoder.topk(hidden), right)


def test_a_cold_nucleus_is_the_likeliest_word(built):
    _, hidden, decoder = built
    for temperature in (1e-3, 1e-6):
        drawn = decoder.sample(hidden[:9], top_p=0.9, temperature=temperature)
        torch.testing.assert_close(drawn, decoder.topk(hidden[:9], 1)[1][:, 0])


def test_its_repr_names_sizes_precision_and_way(built):
    assert "24 -> 600, k=10, precision=0.99, way='preview'" in repr(built[2])


@pytest.mark.parametrize("dram", ["100MB", "4MB"])
def test_given_a_path_the_layer_is_let_go_of(tmp_path, dram):
    head, hidden = make_head(4000, 256)
    right = torch.topk(head(hidden[300:]), 5).indices
    decoder = TopKSoftmax.from_linear(
        head, k=5, contexts=hidden[:300], method="preview", dram=dram, path=tmp_path / "decoder"
    )
    assert (decoder.index.layer is None) == (dram == "4MB")
    with torch.no_grad():
        head.weight.zero_()
    values, indices, _ = decoder.certified_topk(hidden[300:])
    torch.testing.assert_close(indices, right)
    assert (values > 0).all()
    if dram == "100MB":  # gradients take the full layer, of rows that are the decoder's own
        torch.testing.assert_close(torch.topk(decoder(hidden[300:].requires_grad_()), 5).indices, right)


def test_targets_of_another_shape_are_refused(built):
    _, hidden, decoder = built
    states, targets = hidden[:6].reshape(2, 3, 24), torch.arange(6)
    assert decoder.log_prob(states, targets.reshape(2, 3)).shape == (2, 3)
    assert decoder.log_prob(hidden[0], targets[0]).shape == ()
    with pytest.raises(ValueError, match=r"targets: expected shape \[2, 3\], got \[3, 2\]"):
        decoder.log_prob(states, targets.reshape(3, 2))


def plain(result):
    """Return the values of an output, and the words of a sparse one."""
    return (result.values, result.indices) if isinstance(result, SparseLogits) else result


@pytest.mark.long
@pytest.mark.parametrize("output", ["dense", "sparse", "filled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_and_exported_models_keep_it_in_their_graph(output, dtype):
    torch.compiler.reset()  # it compiles a function of torch's own only so often
    head, hidden = make_head(dtype=dtype)
    decoder = TopKSoftmax.from_linear(head, k=10, contexts=hidden[:300], method="preview", output=output)
    model, states = torch.nn.Sequential(torch.nn.Identity(), decoder), hidden[300:307]
    with torch.no_grad():
        right = plain(model(states))
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(plain(compiled(states)), right)
        torch.testing.assert_close(plain(compiled(hidden[310:320])), plain(model(hidden[310:320])))
        rows = torch.export.Dim("rows", min=1, max=99)
        exported = torch.export.export(model, (states,), dynamic_shapes=({0: rows},))
        assert any("memhier" in str(node.target) for node in exported.graph.nodes)
        torch.testing.assert_close(plain(exported.module()(states)), right)
        torch.testing.assert_close(plain(exported.module()(states[:2])), plain(model(states[:2])))
    wanted = states.clone().requires_grad_()
    values = compiled(wanted)
    values = values.values if output == "sparse" else values
    values[torch.isfinite(values)].sum().backward()
    assert wanted.grad.abs().sum() > 0


def test_a_graph_outlives_no_decoder_and_knows_copies_apart():
    head, hidden = make_head()
    decoder = TopKSoftmax.from_linear(head, k=3, contexts=hidden, output="sparse")
    other = copy.deepcopy(decoder)
    turned = torch.nn.Linear(24, 600)
    with torch.no_grad():
        turned.weight.copy_(-head.weight)
    other.refresh(turned)
    with torch.no_grad():
        graph = torch.export.export(torch.nn.Sequential(other), (hidden[:2],))
        torch.testing.assert_close(graph.module()(hidden[:2]).values, other(hidden[:2]).values)
        assert (graph.module()(hidden[:2]).values != decoder(hidden[:2]).values).all()
    del other
    gc.collect()
    with pytest.raises(RuntimeError, match="the decoder of this graph is gone"):
        graph.module()(hidden[:2])


_OF_ANOTHER_PROCESS = """
import sys, torch
from memhier.ann import TopKSoftmax
torch.manual_seed(int(sys.argv[2]))
decoder = TopKSoftmax.from_linear(torch.nn.Linear(8, 50), k=3, output="dense")
states = torch.ones(2, 8)
with torch.no_grad():
    if sys.argv[2] == "1":
        torch.export.save(torch.export.export(torch.nn.Sequential(decoder), (states,)), sys.argv[1])
    else:
        torch.export.load(sys.argv[1]).module()(states)
"""


@pytest.mark.long
def test_a_saved_program_takes_no_decoder_of_another_process(tmp_path):
    run = partial(subprocess.run, capture_output=True, text=True, timeout=300)
    file = str(tmp_path / "program.pt2")
    made = run([sys.executable, "-c", _OF_ANOTHER_PROCESS, file, "1"])
    assert made.returncode == 0, made.stderr
    called = run([sys.executable, "-c", _OF_ANOTHER_PROCESS, file, "2"])
    assert called.returncode != 0
    assert "the decoder of this graph is gone" in called.stderr


def test_an_output_that_there_is_not_is_refused_before_anything_is_made(tmp_path):
    head, hidden = make_head()
    with pytest.raises(ValueError, match="output='whole': expected one of dense, sparse, filled"):
        TopKSoftmax.from_linear(head, k=5, contexts=hidden, output="whole", dram="100MB", path=tmp_path / "decoder")
    assert not (tmp_path / "decoder").exists()


def gradients(decoder, head, hidden, targets):
    """Return the loss of an output and the gradients of states, weight and bias."""
    hidden = hidden.clone().requires_grad_()
    output = decoder(hidden)
    logits = output.values if isinstance(output, SparseLogits) else output
    loss = -(logits.log_softmax(-1).gather(-1, targets[..., None])).sum()
    return loss.detach(), torch.autograd.grad(loss, [hidden, *(part for part in head.parameters())])


@pytest.mark.parametrize("output", ["filled", "dense", "sparse"])
@pytest.mark.parametrize("bias", [True, False])
def test_under_autograd_gradients_are_those_of_the_layer(output, bias):
    head, hidden = make_head(bias=bias)
    decoder = TopKSoftmax.from_linear(head, k=5, contexts=hidden[:300], method="preview", output=output)
    states = hidden[300:306].reshape(2, 3, 24)
    targets = torch.zeros(2, 3, dtype=torch.int64)
    if output != "sparse":
        targets = torch.topk(head(states), 5).indices[..., 2]

    def right(hidden):
        logits = head(hidden)
        if output == "filled":
            return logits
        values, indices = torch.topk(logits, 5)
        return values if output == "sparse" else torch.full_like(logits, -torch.inf).scatter(-1, indices, values)

    found, wanted = gradients(decoder, head, states, targets), gradients(right, head, states, targets)
    torch.testing.assert_close(found[0], wanted[0])
    for mine, theirs in zip(found[1], wanted[1], strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.abs().sum() > 0
    assert decoder.stats()["rows_with_gradients"] == 6
    assert list(decoder.parameters()) == []
    assert decoder.state_dict() == {}
    with torch.no_grad():
        decoder(states.requires_grad_())
    head.requires_grad_(False)
    decoder(states.detach())
    assert decoder.stats()["rows_with_gradients"] == 6


def test_gradients_that_cannot_be_given_are_refused(tmp_path):
    head, hidden = make_head(4000, 256)
    decoder = TopKSoftmax.from_linear(head.requires_grad_(False), k=5, contexts=hidden[:300], method="preview")
    decoder.save(tmp_path / "decoder")
    stored = TopKSoftmax.open(tmp_path / "decoder", dram=4_000_000 if backend.core else 10_500_000)
    assert stored.index.layer is None
    with pytest.raises(RuntimeError, match="its rows lie on SSD; call the layer itself, or the decoder under"):
        stored(hidden[300:].clone().requires_grad_())
    torch.testing.assert_close(stored(hidden[300:]), decoder(hidden[300:]), rtol=1e-4, atol=1e-4)
    other, hidden = make_head()
    parametrized = torch.nn.utils.parametrizations.weight_norm(other)
    computed = TopKSoftmax.from_linear(parametrized, k=5, contexts=hidden[:300], method="preview")
    with pytest.raises(RuntimeError, match="its weight is computed from other parameters"):
        computed(hidden[300:])
    with torch.no_grad():
        torch.testing.assert_close(computed(hidden[300:]).argmax(-1), parametrized(hidden[300:]).argmax(-1))


def test_copies_of_a_decoder_that_is_trained_through_are_trained_alone():
    head, hidden = make_head()
    decoder = TopKSoftmax.from_linear(head, k=5, contexts=hidden[:300], method="preview", output="filled")
    copied = copy.deepcopy(torch.nn.ModuleList([head, decoder]))
    copied[1](hidden[:4]).sum().backward()
    assert copied[0].weight.grad is not None
    assert head.weight.grad is None


@pytest.mark.parametrize(("words", "dimension"), [(10_000, 128), (50_000, 512), (250_000, 512)])
def test_the_cheaper_way_follows_from_sizes_alone(words, dimension):
    pays = [not full_costs_less(batch, words, dimension, 64, 1000) for batch in (1, 4, 16, 64, 256)]
    assert sorted(pays, reverse=True) == pays, "the larger the batch, the less a scan pays"
    assert pays[0]
    assert full_costs_less(1, words, dimension, 64, words)


@pytest.mark.parametrize("row_bytes", [2, 4])
def test_proofs_pay_less_the_more_states_rows_and_failures(row_bytes):
    shape = 50_000, 512
    few, many = (proof_costs_less(1, shape, 512 * row_bytes, width, 64, 0.0) for width in (64, 8192))
    assert few
    assert not many
    assert proof_costs_less(64, shape, 512 * row_bytes, 64, 64, 0.0)
    assert not proof_costs_less(64, shape, 512 * row_bytes, 512, 2048, 0.0)
    assert not proof_costs_less(1, shape, 512 * row_bytes, 64, 64, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_certified_answers_of_a_full_product_are_exact_and_proven_but_for_ties(dtype):
    head, hidden = make_head(dtype=dtype) if dtype != torch.float32 else make_head()
    rows = head.weight.data
    rows[7], head.bias.data[7] = rows[5], head.bias.data[5]
    decoder = TopKSoftmax.from_linear(head, k=10)  # without contexts codes have all directions
    assert not decoder.index.proof_pays(400)
    states = torch.cat([hidden.float(), 5 * rows[5:6].float()])
    values, words, proven = decoder.certified_topk(states, 1)
    exact = states.double() @ rows.double().T + head.bias.double()
    found = exact.gather(1, words)[:, 0]
    torch.testing.assert_close(values[:, 0].double(), found, rtol=1e-5, atol=1e-5)
    assert (found == exact.amax(1))[proven].all()
    assert proven.float().mean() > (0.8 if dtype == torch.float32 else 0.4)
    assert not proven[-1], "rows 5 and 7 are equal"
    whole = decoder.index.topk(states.numpy(), 1, certify=True, complete=True)
    assert (whole.indices[proven.numpy()] == words.numpy()[proven.numpy()]).all()


def test_autocast_changes_no_certified_answer():
    head, _ = make_head()
    decoder = TopKSoftmax.from_linear(head, k=10)
    states = torch.randn(400, 24, generator=torch.Generator().manual_seed(1))
    assert not decoder.index.proof_pays(400)
    right = decoder.certified_topk(states, 5)
    with torch.autocast("cpu"):
        for one, other in zip(decoder.certified_topk(states, 5), right, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_states_that_the_dtype_of_the_layer_would_round_are_certified_as_they_are(dtype):
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(24, 600, bias=False)
    head.weight.data = torch.randn(600, 24, generator=generator) / 100
    head.weight.data[:, 1] = -head.weight.data[:, 0].copy_(torch.randn(600, generator=generator))
    head = head.to(dtype)
    decoder = TopKSoftmax.from_linear(head, k=5)
    states = torch.randn(400, 24, generator=generator) / 30
    states[:, 0], states[:, 1] = 1 + torch.randn(400, generator=generator) * 2.0**-10, 1  # their products cancel out
    assert not decoder.index.proof_pays(400)
    _, words, proven = decoder.certified_topk(states, 1)
    exact = states.double() @ head.weight.double().T
    assert (exact.gather(1, words)[:, 0] == exact.amax(1))[proven].all()


def test_ties_within_rounding_do_not_send_a_batch_to_the_full_product(monkeypatch):
    rng = np.random.default_rng(4)
    weight = np.repeat(rng.normal(size=(1500, 24)), 2, axis=0).astype(np.float32)  # the 5th and the 6th logit are equal
    hidden = rng.normal(size=(400, 24)).astype(np.float32)
    head = torch.nn.Linear(24, 3000)
    head.weight.data, head.bias.data = torch.from_numpy(weight), torch.zeros(3000)
    decoder = TopKSoftmax.from_linear(head, k=5, contexts=torch.from_numpy(hidden[:300]), method="preview")
    fifth = np.sort(hidden[300:].astype(np.float64) @ weight.T.astype(np.float64), 1)[:, -5]
    whole, taken = torch.nn.functional.linear, []
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda states, *rest: taken.append(len(states)) or whole(states, *rest)
    )
    values, words, proven = decoder.certified_topk(torch.from_numpy(hidden[300:]))
    assert not proven.any()
    assert not taken
    np.testing.assert_allclose(values.numpy()[:, -1], fifth, rtol=1e-5, atol=1e-5)
    assert (words.sort(1).values.diff(dim=1) > 0).all()
    found = decoder.index.topk(hidden[300:], certify=True, complete=True)
    np.testing.assert_array_equal(found.indices, words.numpy())
    one = decoder.certified_topk(torch.from_numpy(hidden[300:301]))
    assert taken == [1], "one state alone has the very answer of the layer"
    torch.testing.assert_close(one[0], values[:1])


def test_a_warning_names_the_line_that_called_the_module():
    head, hidden = make_head()
    decoder = TopKSoftmax.from_linear(head, k=5, contexts=hidden, method="preview")
    model = torch.nn.Sequential(torch.nn.Identity(), decoder)
    with torch.no_grad(), pytest.warns(UserWarning, match="unlike the contexts") as said:
        model(30 * hidden)
    assert [each.filename for each in said] == [__file__]
