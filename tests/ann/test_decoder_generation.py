"""Generation by models of several shapes: texts equal to the model's own, and draws of its distribution."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

from memhier.ann.decoder.module.huggingface import accelerate  # noqa: E402
from tests.ann.distribution import check_distribution  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*hidden states are unlike the contexts", "ignore:.*logits_processor")

WORDS = 1200
COMMON = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TINY = COMMON | {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def gpt2():
    config = COMMON | {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))


def gemma2():
    config = transformers.Gemma2Config(**TINY, head_dim=8, final_logit_softcapping=5.0)
    return transformers.Gemma2ForCausalLM(config)


def cohere():
    return transformers.CohereForCausalLM(transformers.CohereConfig(**TINY, logit_scale=0.5))


def granite():
    return transformers.GraniteForCausalLM(transformers.GraniteConfig(**TINY, logits_scaling=1.7))


def t5():
    config = COMMON | {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**config, decoder_start_token_id=0))


def bart():
    config = COMMON | {
        "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24,
        "decoder_attention_heads": 2, "decoder_ffn_dim": 24, "max_position_embeddings": 64, "forced_eos_token_id": None,
        "decoder_start_token_id": 1,
    }  # fmt: skip
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**config))


SHAPES = {each.__name__: each for each in (gpt2, llama, gemma2, cohere, granite, t5, bart)}
CHANGED = ("gemma2", "cohere", "granite")


def text(rows, length, seed=0):
    return torch.randint(3, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=SHAPES)
def pair(request):
    """A model, and the same one accelerated."""
    torch.manual_seed(0)
    model = SHAPES[request.param]().eval()
    head = model.get_output_embeddings()
    with torch.no_grad():
        # As in a trained model, a few words are likely.
        head.weight.copy_(torch.randn(head.weight.shape) * (2.0 / torch.arange(1, 17) ** 0.5))
    fast = accelerate(copy.deepcopy(model), k=12, input_ids=text(40, 20, 7), method="preview", certify=True)
    return model, fast


def written(model, prompt, **options):
    torch.manual_seed(3)
    options = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0} | options
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


def named(options):
    """Return a name for options, the same in every process."""
    return ", ".join(f"{name}={getattr(value, '__name__', str(value)[:40])}" for name, value in options.items())


def some_words(_, ids):
    return [5, 9, 17, int(ids[-1]) % 60 + 3]


def most_words(batch, ids):
    return [word for word in range(WORDS) if (word + batch + len(ids)) % 3]


RAISING = [
    {"repetition_penalty": 0.7}, {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    {"sequence_bias": {(7,): 4.0, (11, 13): 2.0, (200,): -3.0}}, {"suppress_tokens": list(range(100, 140))},
    {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 2}, {"prefix_allowed_tokens_fn": some_words},
    {"prefix_allowed_tokens_fn": most_words}, {"bad_words_ids": [[5], [9, 17], [30]]}, {"forced_eos_token_id": 2},
    {"min_new_tokens": 4, "eos_token_id": [2, 50, 51]}, {"remove_invalid_values": True, "renormalize_logits": True},
    {"begin_suppress_tokens": list(range(3, 90))}, {"encoder_repetition_penalty": 1.5}, {"forced_bos_token_id": 1},
    {"encoder_no_repeat_ngram_size": 2},
    # A word forced at the end though processors before it rule it out.
    {"prefix_allowed_tokens_fn": some_words, "forced_eos_token_id": 2},
    {"sequence_bias": {(7,): 4.0}, "min_new_tokens": 8, "eos_token_id": 2, "forced_eos_token_id": 2},
    # One text, then each, has no word left.
    {"prefix_allowed_tokens_fn": lambda batch, _: [5] if batch == 1 else [5, 9, 17], "bad_words_ids": [[5]]},
    {"prefix_allowed_tokens_fn": lambda *_: [5, 9], "suppress_tokens": [5, 9]},
]  # fmt: skip
DRAWN = [
    {"top_k": 0}, {"top_k": 0, "temperature": 2.0}, {"top_k": 0, "top_p": 0.8}, {"top_k": 0, "min_p": 0.1},
    {"top_k": 0, "typical_p": 0.7}, {"top_k": 0, "epsilon_cutoff": 0.01}, {"top_k": 0, "eta_cutoff": 0.01},
    {"top_k": 10}, {"top_k": 40, "top_p": 0.9}, {"top_k": 0, "top_p": 0.9, "repetition_penalty": 0.6},
    {"top_k": 0, "sequence_bias": {(7,): 4.0}}, {"top_k": 0, "prefix_allowed_tokens_fn": some_words},
    {"top_k": 0, "top_p": 0.95, "suppress_tokens": list(range(60))},
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, *RAISING], ids=named)
def test_greedy_texts_are_the_models_own(pair, options):
    model, fast = pair
    prompt = text(3, 6)
    assert torch.equal(written(fast, prompt, **options), written(model, prompt, **options))


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"num_beams": 8}, {"num_beams": 3, "repetition_penalty": 0.7}])
def test_beams_are_the_models_own(pair, options):
    model, fast = pair
    assert torch.equal(written(fast, text(2, 6), **options), written(model, text(2, 6), **options))


@pytest.mark.parametrize("options", [{}, {"suppress_tokens": [5, 6, 7]}, {"repetition_penalty": 1.2}], ids=named)
def test_assisted_and_looked_up_texts_are_the_models_own(pair, options):
    model, fast = pair
    prompt = text(1, 4).repeat(1, 3)
    right = written(model, prompt, **options)
    assert torch.equal(written(fast, prompt, prompt_lookup_num_tokens=3, **options), right)
    if not model.config.is_encoder_decoder:
        assert torch.equal(written(fast, prompt, assistant_model=copy.deepcopy(model), **options), right)


def check_draws(pair, options, count):
    model, fast = pair
    prompt = text(1, 6)
    asked = {"do_sample": True, "max_new_tokens": 1}
    scores = written(model, prompt, output_scores=True, return_dict_in_generate=True, **asked, **options).scores[0]
    found = written(fast, prompt.repeat(count, 1), **asked, **options)[:, -1]
    check_distribution(found.numpy(), scores[0].double().softmax(-1).numpy())


@pytest.mark.long
@pytest.mark.parametrize("options", DRAWN, ids=named)
def test_draws_have_the_models_distribution(pair, options):
    check_draws(pair, options, 400)


@pytest.mark.parametrize("options", [{"top_k": 0}, {"top_k": 0, "min_p": 0.1, "repetition_penalty": 0.6}], ids=named)
@pytest.mark.parametrize("build", [llama, gemma2])
def test_models_in_half_precision_are_drawn_from_as_they_round(build, options):
    torch.manual_seed(0)
    model = build().eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_()
    model = model.to(torch.bfloat16)
    fast = accelerate(copy.deepcopy(model), k=12, input_ids=text(40, 20, 7), method="preview")
    check_draws((model, fast), options, 1500)
    prompt = text(3, 6)
    penalty = {"repetition_penalty": 0.7}
    assert torch.equal(written(fast, prompt, **penalty), written(model, prompt, **penalty))


@pytest.mark.slow
@pytest.mark.parametrize("options", DRAWN, ids=named)
def test_twenty_thousand_draws_have_the_models_distribution(pair, options):
    check_draws(pair, options, 20_000)


def test_models_that_cap_or_scale_logits_take_the_full_layer_only_where_it_is_counted(pair):
    model, fast = pair
    head = fast.get_output_embeddings()
    before = head.stats()["full_layer"]
    written(fast, text(2, 6), do_sample=True, top_k=0, top_p=0.8)
    written(fast, text(2, 6), repetition_penalty=0.8)
    after = head.stats()["full_layer"]
    grown = {cause for cause, rows in after.items() if rows != before.get(cause, 0)}
    assert grown <= {"undecided", "not proven"}
    assert head.change is not None
    assert (head.change.shape != (0.0, 1.0)) == (type(model).__name__.lower().startswith(CHANGED))


def test_a_forced_word_that_is_ruled_out_is_drawn(pair):
    _, fast = pair
    forced = {"eos_token_id": 2, "forced_eos_token_id": 2, "min_new_tokens": 3, "max_new_tokens": 3}
    assert (written(fast, text(3, 6), do_sample=True, top_k=0, **forced)[:, -1] == 2).all()


def test_the_dtype_of_the_process_does_not_round_logits(pair):
    model, fast = pair
    penalty = {"repetition_penalty": 0.7}
    right = written(model, text(3, 6), **penalty)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = written(fast, text(3, 6), **penalty)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, right)


def test_a_model_in_double_precision_takes_the_full_layer(pair):
    model, fast = (copy.deepcopy(each).double() for each in pair)
    assert torch.equal(written(fast, text(2, 6)), written(model, text(2, 6)))
    assert fast.get_output_embeddings().stats()["full_layer"]["weights of torch.float64 on cpu"] > 0


def test_processors_that_are_not_understood_see_all_logits(pair):
    model, fast = pair
    seen = []

    class Watching(transformers.LogitsProcessor):
        def __call__(self, _, scores):
            seen.append(scores.clone())
            return scores

    for each in (model, fast):
        written(each, text(2, 6), logits_processor=transformers.LogitsProcessorList([Watching()]), max_new_tokens=2)
    assert torch.equal(seen[0], seen[2])
    head = fast.get_output_embeddings()
    assert head.stats()["full_layer"]["logits_processor"] == 4
    before = dict(head.stats()["full_layer"])
    written(fast, text(2, 6), do_sample=True, top_k=0, top_h=0.5, max_new_tokens=2)
    assert head.stats()["full_layer"]["top_h"] - before.get("top_h", 0) == 4
    assert np.isfinite(seen[0].numpy()).all()
