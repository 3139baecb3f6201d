"""Accelerated models of several families write the same text as the models themselves, with any options."""

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

from memhier.ann.decoder.module.huggingface import accelerate  # noqa: E402

WORDS, STEPS = 300, 6
SIZES = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 64, "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
GEMMA = SIZES | {"num_key_value_heads": 1, "head_dim": 16, "final_logit_softcapping": 3.0}
T5 = {
    "vocab_size": WORDS, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2,
    "decoder_start_token_id": 0, "initializer_factor": 3.0,
}  # fmt: skip
BART = {
    "vocab_size": WORDS, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "init_std": 0.3,
}  # fmt: skip
FAMILIES = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS, n_positions=64, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1,
            initializer_range=0.3,
        )
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**GEMMA)),
    "cohere": lambda: transformers.CohereForCausalLM(transformers.CohereConfig(**SIZES, logit_scale=0.3)),
    "granite": lambda: transformers.GraniteForCausalLM(transformers.GraniteConfig(**SIZES, logits_scaling=4.0)),
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**BART)),
}  # fmt: skip
OUTCOMES = {"gemma2": "rising", "cohere": "scaled", "granite": "scaled"}


def only_multiples_of_seven(*_):
    return list(range(0, WORDS, 7))


class RaiseRare(transformers.LogitsProcessor):
    def __call__(self, _, scores):
        return -scores


def contrastive(model, input_ids, *_, **__):
    """Contrastive search: of the four likeliest words the one whose state is least like those before."""
    for _ in range(STEPS):
        shares, likely = model(input_ids).logits[:, -1].softmax(-1).topk(4)
        longer = torch.cat([input_ids.repeat_interleave(4, 0), likely.reshape(-1, 1)], 1)
        states = torch.nn.functional.normalize(model(longer, output_hidden_states=True).hidden_states[-1], dim=-1)
        alike = (states[:, :-1] @ states[:, -1:].mT).amax((1, 2)).reshape(shares.shape)
        best = (0.4 * shares - 0.6 * alike).argmax(1, keepdim=True)
        input_ids = torch.cat([input_ids, likely.gather(1, best)], 1)
    return input_ids


def diverse(model, input_ids, *_, **__):
    """Diverse search: each text pays for the words that those before it take in the same step."""
    for _ in range(STEPS):
        scores, taken = model(input_ids).logits[:, -1].log_softmax(-1), torch.zeros(WORDS)
        chosen = []
        for own in scores:
            chosen.append((own - 2 * taken).argmax())
            taken[chosen[-1]] += 1
        input_ids = torch.cat([input_ids, torch.stack(chosen)[:, None]], 1)
    return input_ids


SAMPLE = {"do_sample": True}
SETTINGS = {
    "greedy": {},
    "sample": SAMPLE | {"top_k": 0},
    "top_k": SAMPLE | {"top_k": 10},
    "top_k above k": SAMPLE | {"top_k": 100},
    "hot top_k": SAMPLE | {"top_k": 10, "temperature": 3.0},
    "hot": SAMPLE | {"top_k": 0, "temperature": 3.0},
    "top_p": SAMPLE | {"top_k": 0, "top_p": 0.9},
    "top_k and top_p": SAMPLE | {"top_k": 20, "top_p": 0.7},
    "typical": SAMPLE | {"top_k": 0, "typical_p": 0.7},
    "typical of top_k": SAMPLE | {"top_k": 20, "typical_p": 0.7},
    "min_p": SAMPLE | {"top_k": 0, "min_p": 0.05},
    "top_h": SAMPLE | {"top_k": 20, "top_h": 0.5},
    "epsilon": SAMPLE | {"top_k": 0, "epsilon_cutoff": 0.003},
    "eta": SAMPLE | {"top_k": 0, "eta_cutoff": 0.003},
    "top_k and all behind it": SAMPLE | {"top_k": 20, "min_p": 0.01, "epsilon_cutoff": 0.001, "eta_cutoff": 0.001},
    "prefix": {"prefix_allowed_tokens_fn": only_multiples_of_seven},
    "sampled prefix": SAMPLE | {"prefix_allowed_tokens_fn": only_multiples_of_seven, "top_k": 5},
    "custom": {"logits_processor": transformers.LogitsProcessorList([RaiseRare()])},
    "suppress many": {"suppress_tokens": list(range(3, 290))},
    "suppress few": {"suppress_tokens": list(range(3, 12)), "begin_suppress_tokens": [20, 30]},
    "bad words": {"bad_words_ids": [[word] for word in range(3, 290)]},
    "bias": {"sequence_bias": [[[7], 9.0], [[8], 8.0]]},
    "raised repetition": {"repetition_penalty": 0.5},
    "no repetition": {"repetition_penalty": 3.0, "no_repeat_ngram_size": 1},
    "sampled, no repetition": SAMPLE | {"repetition_penalty": 3.0, "top_k": 5},
    "decay": {"exponential_decay_length_penalty": (2, 2.0), "eos_token_id": 1},
    "least length": {"min_new_tokens": 5, "eos_token_id": 1},
    "least length with the prompt": {"min_length": 11, "eos_token_id": 1},
    "forced": {"forced_bos_token_id": 5, "forced_eos_token_id": 6},
    "guided": {"guidance_scale": 2.0},
    "watermark": {"watermarking_config": transformers.WatermarkingConfig(bias=3.0)},
    "watermark of n-grams": SAMPLE
    | {"watermarking_config": transformers.SynthIDTextWatermarkingConfig(ngram_len=2, keys=[3, 5, 7]), "top_k": 10},
    # These left transformers: a function given by the user searches.
    "contrastive": {"custom_generate": contrastive},
    "diverse": {"custom_generate": diverse},
    "renormalised": SAMPLE | {"top_k": 10, "renormalize_logits": True},
    "lookup": {"prompt_lookup_num_tokens": 2},
    "beams": {"num_beams": 3},
    "sampled beams": SAMPLE | {"num_beams": 3, "top_k": 10},
    "beams with scores": {"num_beams": 3, "return_dict_in_generate": True, "output_scores": True},
}


# Other families differ below the layer and behind it, but choose words alike.
OF_OTHERS = (
    "greedy", "top_k", "hot top_k", "top_p", "top_h", "top_k and top_p", "prefix", "custom", "suppress few",
    "no repetition", "beams", "beams with scores",
)  # fmt: skip


def words(rows, length, seed):
    return torch.randint(3, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def generate(model, options):
    torch.manual_seed(11)
    rows = 1 if "prompt_lookup_num_tokens" in options else 3
    text = words(rows, 6, 5)
    given = {"do_sample": False, "eos_token_id": None, "pad_token_id": 2, "max_new_tokens": STEPS} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about its own options
        found = model.generate(text, attention_mask=torch.ones_like(text), **given)
    return found.sequences if "output_scores" in options else found


# Cohere scales its logits as Granite does; T5 has an encoder as BART has.
RARE = ("granite", "bart")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] if name in RARE else []) for name in FAMILIES]
)
def family(request):
    """A family's name, a model, and its text with each setting."""
    torch.manual_seed(0)
    name, model = request.param, FAMILIES[request.param]().eval()
    settings = SETTINGS if name == "gpt2" else OF_OTHERS
    return name, model, {setting: generate(model, SETTINGS[setting]) for setting in settings}


@pytest.mark.long
@pytest.mark.parametrize("certify", [False, True], ids=["uncertified", "certified"])
def test_every_option_gives_the_models_own_text(family, certify):
    name, model, written = family
    fast = accelerate(copy.deepcopy(model), k=40, input_ids=words(20, 24, 9), certify=certify, method="preview")
    head = fast.get_output_embeddings()
    assert head.outcome == OUTCOMES.get(name, "same")
    for setting, right in written.items():
        text = generate(fast, SETTINGS[setting])
        if SETTINGS[setting].get("do_sample"):  # other draws of the distribution that test_decoder_generation compares
            right = generate(fast, SETTINGS[setting])
        assert torch.equal(text, right), setting
    counted = head.stats()["full_layer"]
    assert {"top_h", "logits_processor", "output_scores"} <= set(counted)
    assert ("custom_generate" in counted) == (name == "gpt2")
    assert not {"top_k", "top_p", "min_p", "prefix_allowed_tokens_fn", "suppress_tokens"} & set(counted)
    assert sum(counted.values()) < head.rows


def test_a_cap_in_the_reach_of_the_logits_leaves_proofs_to_the_layer():
    torch.manual_seed(0)
    model = FAMILIES["gemma2"]().eval()
    model.config.final_logit_softcapping = 1e-3  # all that is above is equal
    right = generate(model, {})
    fast = accelerate(copy.deepcopy(model), k=20, input_ids=words(20, 24, 9), certify=True, method="preview")
    assert torch.equal(generate(fast, {}), right)


@pytest.mark.parametrize("change", ["bias", "order", "probabilities"])
def test_logits_that_are_changed_after_the_layer_are_found(change):
    torch.manual_seed(0)
    model = FAMILIES["gpt2"]()

    class Changed(type(model)):
        def forward(self, *arguments, **options):
            output = super().forward(*arguments, **options)
            logits = output.logits
            bias = torch.arange(WORDS) % 7
            output.logits = {"bias": logits + bias, "order": -logits, "probabilities": logits.softmax(-1)}[change]
            return output

    model.__class__ = Changed
    right = generate(model.eval(), {})
    with pytest.warns(UserWarning, match="Changed: its logits are not those of its output layer"):
        accelerate(model, k=20, input_ids=words(20, 24, 9), certify=True, method="preview")
    assert torch.equal(generate(model, {}), right)
    assert generate(model, {"num_beams": 3}).shape == (3, 6 + STEPS)
    assert set(model.get_output_embeddings().stats()["full_layer"]) == {
        "logits changed after the layer", "num_beams of this layer",
    }  # fmt: skip


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_model_with_an_encoder_learns_from_its_own_text(name, given):
    torch.manual_seed(0)
    model = FAMILIES[name]().eval()
    text = words(6, 24, 9) if given else None
    right = [generate(model, {}), generate(model, {"num_beams": 3})]
    head = accelerate(model, k=40, input_ids=text, certify=True, method="preview").get_output_embeddings()
    assert torch.equal(generate(model, {}), right[0])
    assert torch.equal(generate(model, {"num_beams": 3}), right[1])
    assert set(head.stats()["full_layer"]) <= {"not proven"}
    assert head.stats()["contexts_checked"] > 0


def test_half_precision_is_the_models_own():
    torch.manual_seed(0)
    model = FAMILIES["llama"]().eval().bfloat16()
    settings = ({}, {"do_sample": True, "top_k": 10})
    right = [generate(model, options) for options in settings]
    accelerate(model, k=40, input_ids=words(20, 24, 9), certify=True, method="preview")
    for options, text in zip(settings, right, strict=True):
        assert torch.equal(generate(model, options), text), options
