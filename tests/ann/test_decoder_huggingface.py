"""The decoder in a small model in the shape of GPT-2, trained on the spot: greedy, beams, sampling, undo."""

import copy
import gc
import pickle
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

from memhier.ann.decoder import TopKSoftmax  # noqa: E402
from memhier.ann.decoder.module import huggingface  # noqa: E402
from memhier.ann.decoder.module.contexts import ContextSample  # noqa: E402
from memhier.ann.decoder.module.generation import need_of  # noqa: E402
from memhier.ann.decoder.module.huggingface import AcceleratedHead, accelerate, rescore, undo  # noqa: E402

WORDS = 400
UNLIKE = pytest.mark.filterwarnings("ignore:.*hidden states are unlike the contexts")


def make_text(count, length, generator):
    """Sentences of a small grammar: the next word follows from the last two, but for some noise."""
    text = torch.randint(WORDS, (count, 2), generator=generator)
    for _ in range(length - 2):
        following = (3 * text[:, -1] + 7 * text[:, -2] + torch.randint(3, (count,), generator=generator)) % WORDS
        text = torch.cat([text, following[:, None]], 1)
    return text


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    model.train()
    for _ in range(40):
        text = make_text(16, 24, generator)
        loss = model(text, labels=text).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@pytest.fixture
def model(trained):
    return copy.deepcopy(trained)


def prompts():
    return make_text(4, 6, torch.Generator().manual_seed(5))


def generate(model, **options):
    torch.manual_seed(11)
    text = prompts()
    return model.generate(
        text, attention_mask=torch.ones_like(text), max_new_tokens=20, eos_token_id=None, pad_token_id=0, **options
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_ways_that_are_timed_are_those_of_a_step(model, monkeypatch, dtype):
    asked = []

    def measure(ways, states, seed):
        asked.append((ways, states))
        return ((1, "preview"),)

    monkeypatch.setattr(huggingface, "measure_choices", measure)
    head = accelerate(model.to(dtype), k=20, certify=True).get_output_embeddings()
    assert head.stats()["contexts_checked"] == 0
    for (ways, states), step in zip(asked, (head.filled, lambda hidden: head.proven(hidden, 20)), strict=True):
        some = torch.from_numpy(states[:64]).to(dtype)
        with torch.no_grad():
            torch.testing.assert_close(ways["preview"](states[:64]), step(some), rtol=0, atol=0)
            torch.testing.assert_close(ways["full"](states[:64]), head.head(some), rtol=0, atol=0)


@pytest.mark.parametrize("source", ["written", "given"])
def test_greedy_is_the_models_own(model, source):
    right = generate(model, do_sample=False)
    text = None if source == "written" else make_text(40, 24, torch.Generator().manual_seed(9))
    assert accelerate(model, k=20, input_ids=text, certify=True, method="preview") is model
    assert isinstance(model.get_output_embeddings(), AcceleratedHead)
    torch.testing.assert_close(generate(model, do_sample=False), right)
    assert model.get_output_embeddings().calls >= 20


def test_calls_of_the_model_itself_are_its_own(model):
    text = prompts()
    with torch.no_grad():
        right = model(text, labels=text)
        accelerate(model, k=30, method="preview")
        found = model(text, labels=text)
    assert torch.equal(found.logits, right.logits)
    assert found.loss == right.loss
    assert model.get_output_embeddings().stats()["full_layer"] == {"a call that is not of generate": text.numel()}


def test_logits_of_calls_outside_generate_normalise_as_the_models_do(model):
    text = prompts()
    head = accelerate(model, k=30, method="preview").get_output_embeddings()
    hidden = model.transformer(text).last_hidden_state.detach()
    with torch.no_grad():
        right = head.head(hidden).log_softmax(-1)
        found = AcceleratedHead(head.head, head.decoder).eval()(hidden).log_softmax(-1)
    top = torch.topk(right, 20, dim=-1).indices
    torch.testing.assert_close(found.gather(-1, top), right.gather(-1, top), rtol=0, atol=2e-3)


def test_beams_score_as_the_models_do(model):
    options = {"num_beams": 4, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    right = generate(model, **options)
    accelerate(model, k=100, method="preview")
    found = generate(model, **options)
    torch.testing.assert_close(found.sequences, right.sequences)
    torch.testing.assert_close(found.sequences_scores, right.sequences_scores, rtol=0, atol=2e-3)


@pytest.mark.parametrize("options", [{"top_k": 10}, {"top_k": 50, "top_p": 0.3}, {"top_k": 20, "temperature": 0.7}])
def test_samplers_draw_as_from_the_model(model, options):
    right = generate(model, do_sample=True, **options)
    accelerate(model, k=200, method="preview")
    found = generate(model, do_sample=True, **options)
    assert (found == right).float().mean() > 0.95


def test_logits_processors_see_the_words_that_they_rule_out(model):
    options = {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": [[5], [17]]}
    right = generate(model, **options)
    accelerate(model, k=60, method="preview")
    torch.testing.assert_close(generate(model, **options), right)


def test_ties_are_left_to_the_layer_itself(model):
    weight = model.get_output_embeddings().weight.data
    weight[WORDS // 2 :] = weight[: WORDS // 2]
    right = generate(model, do_sample=False)
    accelerate(model, k=20, certify=True, method="preview")
    torch.testing.assert_close(generate(model, do_sample=False), right)
    head = model.get_output_embeddings()
    assert head.completed > head.rows // 2


def test_greedy_among_some_words_is_the_models_own_with_words_within_rounding(model):
    weight = model.get_output_embeddings().weight.data
    weight[WORDS // 2 :] = weight[: WORDS // 2] * (1 + 2.0**-23 * torch.randint(-1, 2, (WORDS // 2, 32)))
    options = {"do_sample": False, "suppress_tokens": [3]}  # so that each step needs two words
    right = generate(model, **options)
    accelerate(model, k=20, certify=True, method="preview")
    assert torch.equal(generate(model, **options), right)
    assert not model.get_output_embeddings().stats()["full_layer"]


def test_training_goes_through_the_layer_itself(model):
    accelerate(model, k=10, method="preview")
    model.train()
    text = prompts()
    model(text, labels=text).loss.backward()
    head = model.get_output_embeddings()
    assert head.weight.grad is not None
    assert head.calls == 0


@UNLIKE
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"do_sample": False}, id="greedy", marks=pytest.mark.slow),
        pytest.param({"do_sample": True, "top_k": 0}, id="waits"),
    ],
)
def test_a_compiled_model_keeps_the_layer_in_one_graph(model, options):
    right = generate(accelerate(copy.deepcopy(model), k=20, certify=True, method="preview"), **options)
    torch.compiler.reset()
    accelerate(model, k=20, certify=True, method="preview")
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True, dynamic=True)
    assert torch.equal(generate(model, use_cache=False, **options), right)
    assert model.get_output_embeddings().calls >= 20


def test_undo_restores_the_layer(model):
    head = model.get_output_embeddings()
    weight = head.weight
    accelerate(model, k=10, method="preview")
    assert model.get_output_embeddings().weight is weight
    assert undo(model) is model
    assert model.get_output_embeddings() is head
    assert model.transformer.wte.weight is weight
    with pytest.raises(ValueError, match="not accelerated"):
        undo(model)


def test_errors_name_the_argument(model):
    with pytest.raises(TypeError, match="model: expected a causal language model"):
        accelerate(torch.nn.Linear(3, 3))
    accelerate(model, k=10, method="preview")
    with pytest.raises(ValueError, match="accelerated already"):
        accelerate(model)


def test_beams_rescored_have_the_models_own_scores(model):
    options = {"num_beams": 4, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    right = generate(model, **options)
    accelerate(model, k=100, method="preview")
    found = generate(model, **options)
    torch.testing.assert_close(found.sequences, right.sequences)
    head = model.get_output_embeddings()
    scores = rescore(model, found.sequences, 6)
    assert model.get_output_embeddings() is head
    torch.testing.assert_close(scores / 20, right.sequences_scores.double(), rtol=0, atol=1e-5)
    text = found.sequences[:1].clone()
    text[0, 6:] = torch.tensor([1, 2, 3, 4, 399] + [399] * 5 + [0] * 10)
    torch.testing.assert_close(rescore(model, text, 6, eos_token_id=399), rescore(model, text[:, :11], 6))
    with pytest.raises(ValueError, match="start=26: expected 1 to 25"):
        rescore(model, found.sequences, 26)


def test_a_state_dict_does_not_change(model):
    right = model.state_dict()
    accelerate(model, k=10, method="preview")
    found = model.state_dict()
    assert list(found) == list(right)
    assert all(found[name].data_ptr() == right[name].data_ptr() for name in right)
    again = copy.deepcopy(model)
    torch.testing.assert_close(generate(again, do_sample=False), generate(model, do_sample=False))
    assert again.get_output_embeddings().weight is again.transformer.wte.weight
    assert again.get_output_embeddings().head.weight is again.transformer.wte.weight


@UNLIKE
def test_a_likeliest_word_that_estimates_miss_is_still_the_answer():
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(32, 600)
    states = torch.zeros(400, 32)
    states[:, :4] = torch.randn(400, 4, generator=generator)
    with torch.no_grad():
        head.weight[:] = 0
        head.weight[:, :4] = torch.randn(600, 4, generator=generator)
        head.bias[:] = 0
        # One row lies where no context went that the codes were made from.
        head.weight[500, 20], head.bias[500] = 100, -50
    decoder = TopKSoftmax.from_linear(head, k=5, contexts=states[:300], method="preview", rank=4, output="filled")
    asked = states[300:].clone()
    asked[::2, 20] = 1
    with torch.no_grad():
        right = head(asked).argmax(-1)
        replacement = AcceleratedHead(head, decoder, certify=True).eval()
        torch.testing.assert_close(replacement(asked).argmax(-1), right)
    assert (right == 500).sum() == 50
    assert decoder.index.topk(asked.numpy(), 1, certify=True).proven.mean() > 0.5


def test_modes_of_parts_stay_as_they_were(model):
    model.train()
    frozen = model.transformer.h[0].eval()
    accelerate(model, k=10, method="preview")
    assert not frozen.training
    assert model.transformer.h[1].training
    assert model.training


def forbid_scans(model, monkeypatch):
    """Fail where probabilities among all words are asked for."""

    def refuse(*_, **__):
        raise AssertionError("log Z was asked for")

    monkeypatch.setattr(model.get_output_embeddings().decoder.index, "distribution", refuse)


@pytest.mark.parametrize("certify", [False, True])
@pytest.mark.parametrize("method", ["graph", "preview"])
@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 10, "top_p": 0.8}])
def test_where_ranks_are_enough_no_probabilities_are_made(model, monkeypatch, method, certify, options):
    options["repetition_penalty"] = 1.3
    right = generate(model, **options)
    text = make_text(40, 24, torch.Generator().manual_seed(9))
    accelerate(model, k=40, input_ids=text, method=method, certify=certify)
    forbid_scans(model, monkeypatch)
    torch.testing.assert_close(generate(model, **options), right)
    torch.testing.assert_close(generate(copy.deepcopy(model), **options), right)
    head = model.get_output_embeddings()
    assert not head.stats()["full_layer"]
    if not certify and not options["do_sample"]:
        assert head.completed == 0
    if not certify:  # proven beams take bounds
        with pytest.raises(AssertionError, match="log Z"):
            generate(model, num_beams=2)


@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({}, "largest"),
        ({"do_sample": True}, "more"),  # among 50 by default, of which 20 are looked for
        ({"do_sample": True, "top_k": 20}, "proven"),
        ({"do_sample": True, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8, "temperature": 3.0}, "proven"),
        ({"do_sample": True, "top_k": 21}, "more"),
        ({"do_sample": True, "top_k": 0, "top_p": 0.9}, "top_k"),
        ({"do_sample": True, "top_k": None}, "top_k"),
        ({"do_sample": True, "top_k": 5, "top_h": 0.5}, "top_h"),
        ({"num_beams": 3}, "filled"),
        ({"num_beams": 11}, "more"),
        ({"num_beams": 3, "do_sample": True}, "num_beams and do_sample"),
        ({"output_logits": True}, "output_logits"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"guidance_scale": 1}, "largest"),
        ({"exponential_decay_length_penalty": (3, 1.05)}, "exponential_decay_length_penalty"),
        ({"logits_processor": [print]}, "logits_processor"),
        ({"logits_processor": []}, "largest"),
        ({"stopping_criteria": [print]}, "stopping_criteria"),
        ({"prefix_allowed_tokens_fn": print}, "prefix_allowed_tokens_fn"),
        ({"repetition_penalty": 1.2, "no_repeat_ngram_size": 2}, "largest"),
        ({"repetition_penalty": 0.8}, "repetition_penalty"),
        ({"suppress_tokens": list(range(19))}, "largest"),
        ({"suppress_tokens": list(range(20))}, "more"),
        ({"bad_words_ids": [[1, 2]] * 20}, "more"),
        ({"an_option_of_tomorrow": 3}, "an_option_of_tomorrow"),
        ({"attention_mask": torch.ones(1, 3), "max_new_tokens": 3}, "largest"),
    ],
)
def test_the_needs_of_generate_follow_from_its_options(model, options, way):
    def decided(arguments, given):
        need = need_of(model, arguments, given)
        return "more" if need.words > 20 else need.reason if need.logits == "full" else need.logits

    assert decided((), options) == way
    # In a configuration None is not set.
    if all(hasattr(transformers.GenerationConfig(), name) for name in options) and None not in options.values():
        assert decided((None, transformers.GenerationConfig(**options)), {}) == way


def test_the_needs_of_generate_follow_from_the_models_own_options_too(model):
    def way(*arguments, **options):
        return need_of(model, arguments, options).logits

    model.generation_config.num_beams = 3
    assert way(None, transformers.GenerationConfig(max_new_tokens=5)) == "filled"
    assert way(None, transformers.GenerationConfig(num_beams=1)) == "largest"
    assert way(num_beams=1) == "largest"
    model.generation_config.num_beams, model.generation_config.top_k = 1, 10
    assert way(None, transformers.GenerationConfig(do_sample=True)) == "proven"
    # None given by name is no limit at all.
    assert way(do_sample=True, top_k=None) == "full"


def test_a_generate_that_is_not_that_of_transformers_takes_the_full_layer(model):
    class Another(type(model)):
        def _sample(self, *arguments, **options):
            return super()._sample(*arguments, **options)

    assert need_of(model, (), {}).logits == "largest"
    model.__class__ = Another
    assert need_of(model, (), {}).logits == "full"


def test_each_step_of_a_growing_text_may_rule_out_one_word_more(model):
    options = {"do_sample": False, "repetition_penalty": 5.0}
    right = generate(model, **options)
    head = accelerate(model, k=16, method="preview", certify=True).get_output_embeddings()
    torch.testing.assert_close(generate(model, **options), right)
    # Of 6 words and one to begin with, 9 more are written before the 16 might all be ruled out. Then the processors
    # themselves ask for the words of the text, and a step takes the full layer only in doubt.
    assert set(head.stats()["full_layer"]) <= {"not proven"}
    assert sum(head.stats()["full_layer"].values()) <= 8


def test_processors_that_are_given_by_place_see_all_logits(model):
    seen = []
    processors = transformers.LogitsProcessorList([lambda _, scores: seen.append(scores.clone()) or scores])
    model.generate(prompts(), None, processors, max_new_tokens=2)
    accelerate(model, k=20, method="preview")
    model.generate(prompts(), None, processors, max_new_tokens=2)
    assert torch.equal(seen[0], seen[2])


def test_another_model_asked_while_one_generates_answers_in_full(model):
    other = accelerate(copy.deepcopy(model), k=20, method="preview")
    with torch.no_grad():
        right = undo(copy.deepcopy(other))(prompts()).logits
    seen = []

    def ask(*_, **__):
        seen.append(other(prompts()).logits)
        return torch.zeros(4, dtype=torch.bool)

    generate(accelerate(model, k=20, method="preview"), do_sample=False, stopping_criteria=[ask])
    assert len(seen) == 20
    torch.testing.assert_close(seen[0], right)


@UNLIKE
@pytest.mark.parametrize("copied", [False, True])
def test_weights_that_a_state_dict_puts_in_their_place_are_taken(trained, model, copied):
    accelerate(model, k=60, method="preview")
    model = copy.deepcopy(model) if copied else model
    other = copy.deepcopy(trained)
    with torch.no_grad():
        other.lm_head.weight += torch.randn(other.lm_head.weight.shape, generator=torch.Generator().manual_seed(2))
    model.load_state_dict(other.state_dict(), assign=True)
    right = generate(other, do_sample=False)
    torch.testing.assert_close(generate(model, do_sample=False), right)
    torch.testing.assert_close(generate(undo(model), do_sample=False), right)


def test_undo_gives_generate_back(model):
    accelerate(model, k=10, method="preview")
    assert "generate" in vars(model)
    undo(model)
    assert model.generate.__func__ is type(model).generate
    accelerate(model, k=10, method="preview")
    # A layer that the user puts in its place stays.
    model.set_output_embeddings(model.get_output_embeddings().head)
    assert generate(model, do_sample=False).shape == (4, 26)


def test_a_pickled_model_stays_accelerated(model):
    accelerate(model, k=60, method="preview")
    bias = {"sequence_bias": {(5,): 3.0}}
    right = [generate(model, do_sample=False, **options) for options in ({}, bias)]
    again = pickle.loads(pickle.dumps(model))
    before = again.get_output_embeddings().calls
    for options, text in zip(({}, bias), right, strict=True):
        torch.testing.assert_close(generate(again, do_sample=False, **options), text)
    stats = again.get_output_embeddings().stats()
    assert stats["calls"] > before
    assert stats["full_layer"] == model.get_output_embeddings().stats()["full_layer"]
    assert model.generate.args[0] is model
    assert again.generate.args[0] is again
    undo(again)
    assert not {"generate", "_get_logits_processor"} & set(vars(again))


def test_a_generate_of_the_users_own_stays(model):
    model.generate = own = lambda *_, **__: "mine"
    accelerate(model, k=10, input_ids=make_text(40, 24, torch.Generator().manual_seed(9)), method="preview")
    assert model.generate() == "mine"
    assert undo(model).generate is own


@pytest.mark.long
def test_of_all_hidden_states_that_are_seen_a_sample_is_kept():
    def rows_held():
        """The rows of all matrices of a dtype that only this test uses."""
        tensors = (each for each in gc.get_objects() if type(each) is torch.Tensor)
        return sum(len(each) for each in tensors if each.dtype == torch.int16 and each.ndim == 2)

    held = []
    for sizes in ((1000,), (7,) * 142 + (6,), (600, 400)):
        sample, start = ContextSample(64, 3), 0
        for size in sizes:
            sample.add(torch.arange(start, start + size, dtype=torch.int16)[:, None])
            start += size
            held.append(rows_held())
        found = sample.states()[:, 0].clone()
        assert len(found) == 64
        assert (found.diff() > 0).all()
        assert 300 < found.float().mean() < 700
    assert max(held[1:]) <= 600, "the rows of one call, and twice the sample"
    assert max(held[1:144]) <= 2 * 64 + 7
    few = ContextSample(64, 3)
    few.add(torch.arange(5)[:, None])
    assert few.states()[:, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("options", [{"do_sample": False}, {"num_beams": 3, "do_sample": False}])
def test_weights_that_changed_are_seen_by_the_next_step(model, options):
    accelerate(model, k=60, method="preview")
    generate(model, **options)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    text = make_text(16, 24, torch.Generator().manual_seed(3))
    model(text, labels=text).loss.backward()
    optimizer.step()
    model.eval()
    found = generate(model, **options)
    assert not model.get_output_embeddings().decoder.is_stale(model.get_output_embeddings().head)
    torch.testing.assert_close(found, generate(undo(model), **options))


@UNLIKE
@pytest.mark.parametrize("options", [{"do_sample": False}, {"num_beams": 3, "do_sample": False}])
def test_adapters_that_are_merged_without_a_version_are_seen_by_the_next_call(model, options):
    text = make_text(40, 24, torch.Generator().manual_seed(9))
    other = copy.deepcopy(model)
    generate(accelerate(model, k=20, input_ids=text), **options)
    delta = torch.randn(WORDS, 1, generator=torch.Generator().manual_seed(2)) * torch.randn(1, 32)
    model.get_output_embeddings().head.weight.data.add_(delta)
    other.get_output_embeddings().weight.data.add_(delta)
    assert (generate(model, **options) == generate(other, **options)).all()
    assert set(model.get_output_embeddings().stats()["full_layer"]) <= {"faster"}


@pytest.mark.parametrize("options", [{"do_sample": False}, {"num_beams": 3, "do_sample": False}])
def test_a_model_that_is_in_training_mode_writes_too(model, options):
    accelerate(model, k=20, input_ids=make_text(40, 24, torch.Generator().manual_seed(9)), certify=True)
    right = generate(model, **options)
    for part in model.modules():
        part.training = isinstance(part, AcceleratedHead)  # without dropout
    assert (generate(model, **options) == right).all()


class Adapted(torch.nn.Linear):
    """An adapter as a class made of Linear."""

    def forward(self, hidden):
        return super().forward(hidden) + hidden.sum(-1, keepdim=True) * torch.linspace(-1, 1, self.out_features)


@UNLIKE
@pytest.mark.parametrize("options", [{"do_sample": False}, {"num_beams": 3, "do_sample": False}])
@pytest.mark.parametrize("kind", ["class", "hook", "input hook", "later hook", "own later hook", "autocast"])
def test_a_layer_that_does_more_than_a_product_is_left_to_itself(model, options, kind):
    def change(_, __, logits):
        return logits + torch.linspace(-9, 9, WORDS)

    def change_input(_, inputs):
        return (inputs[0] * torch.linspace(-2, 2, 32),)

    if kind == "class":
        adapted = Adapted(32, WORDS, bias=False)
        adapted.weight = model.get_output_embeddings().weight
        model.set_output_embeddings(adapted)
    elif kind == "hook":
        model.get_output_embeddings().register_forward_hook(change)
    elif kind == "input hook":
        model.get_output_embeddings().register_forward_pre_hook(change_input)
    other = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        accelerate(model, k=20, input_ids=make_text(40, 24, torch.Generator().manual_seed(9)), method="preview")
    assert any("not those of its output layer" in str(each.message) for each in said) == (kind in ("class", "hook"))
    head = model.get_output_embeddings()
    if "later" in kind:
        other.get_output_embeddings().register_forward_hook(change)
        (head if "own" in kind else head.head).register_forward_hook(change)
    with torch.autocast("cpu", enabled=kind == "autocast"):
        assert (generate(model, **options) == generate(other, **options)).all()
    assert sum(head.stats()["full_layer"].values()) == head.stats()["rows"] > 0


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (torch.zeros(100, dtype=torch.int64), TypeError, r"int64 \[n, t\], got torch.int64 \[100\]"),
        (torch.zeros(2, 40), TypeError, "got torch.float32"),
        ([[1, 2]], TypeError, "got list"),
        (torch.zeros(1, 9, dtype=torch.int64), ValueError, "holds 9 words: expected at least 64"),
        (torch.full((2, 40), 400), ValueError, "expected words 0 to 399, got 400 to 400"),
        (torch.zeros(2, 65, dtype=torch.int64), ValueError, "65 words a row, but the model reads 64"),
    ],
)
def test_text_that_the_model_cannot_read_is_refused(model, text, error, words):
    with pytest.raises(error, match=f"input_ids.*{words}"):
        accelerate(model, input_ids=text)
    assert not isinstance(model.get_output_embeddings(), AcceleratedHead)


def test_a_model_that_does_not_write_is_asked_for_text():
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    bert = transformers.BertForMaskedLM(config).eval()
    with pytest.raises(TypeError, match="BertForMaskedLM does not write text; give input_ids"):
        accelerate(bert)
    text = torch.randint(300, (4, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        right = bert(text).logits.argmax(-1)
        accelerate(bert, input_ids=text, k=20, certify=True, method="preview")
        torch.testing.assert_close(bert(text).logits.argmax(-1), right)


def test_a_model_of_anyones_own_may_have_no_more_than_its_output_layer():
    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = torch.nn.Embedding(300, 16), torch.nn.Linear(16, 300)

        def get_output_embeddings(self):
            return self.head

        def set_output_embeddings(self, layer):
            self.head = layer

        def forward(self, text):
            return self.head(self.words(text))

    torch.manual_seed(0)
    plain, text = Plain().eval(), torch.randint(300, (4, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        right = plain(text).argmax(-1)
        accelerate(plain, input_ids=text, k=20, certify=True, method="preview")
        torch.testing.assert_close(plain(text).argmax(-1), right)
