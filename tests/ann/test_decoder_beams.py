"""Beams of an accelerated model that are proven: the texts of the model itself, of any length and settings."""

import copy
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

from memhier.ann.decoder.module.huggingface import accelerate  # noqa: E402
from memhier.ann.decoder.module.proof import Proof  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*hidden states are unlike the contexts")

WORDS, END = 900, 2


def gpt2(scale: float, pull: float, seed: int):
    """Return a model whose texts end now and then: the end's row is near all hidden states."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=24, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=END,
        pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        rows = model.lm_head.weight
        rows.mul_(scale * torch.exp(0.3 * torch.randn(WORDS, 1)))
        mean = model.transformer(torch.randint(WORDS, (4, 16))).last_hidden_state.flatten(0, 1).mean(0)
        rows[END] += pull * mean / mean.norm()
    return model


def bart():
    torch.manual_seed(3)
    config = transformers.BartConfig(
        vocab_size=WORDS, d_model=24, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=64, bos_token_id=1,
        eos_token_id=END, pad_token_id=0, forced_eos_token_id=END, forced_bos_token_id=7, decoder_start_token_id=1,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20 * torch.exp(0.3 * torch.randn(WORDS, 1)))
    return model


def pair_of(model):
    fast = copy.deepcopy(model)
    text = torch.randint(3, WORDS, (12, 48), generator=torch.Generator().manual_seed(1))
    return model, accelerate(fast, k=40, input_ids=text, certify=True, method="preview")


@pytest.fixture(scope="module", params=[(10.0, 4.0, 0), (25.0, 8.0, 1)], ids=["flat", "steep"])
def pair(request):
    return pair_of(gpt2(*request.param))


def written(model, prompt, **options):
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, max_new_tokens=12, do_sample=False, **options)


def prompts(rows: int = 3):
    return torch.randint(3, WORDS, (rows, 5), generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2}, {"num_beams": 5}, {"num_beams": 5, "length_penalty": 0.3},
        {"num_beams": 4, "early_stopping": True}, {"num_beams": 3, "early_stopping": "never", "length_penalty": 2.0},
        {"num_beams": 4, "num_return_sequences": 4}, {"num_beams": 3, "eos_token_id": [END, 5, 9]},
        {"num_beams": 4, "no_repeat_ngram_size": 2, "min_new_tokens": 4}, {"num_beams": 3, "eos_token_id": None},
        {"num_beams": 3, "suppress_tokens": [4, 8, 30], "forced_eos_token_id": END},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)  # fmt: skip
def test_proven_beams_are_the_models_own(pair, options):
    model, fast = pair
    assert torch.equal(written(fast, prompts(), **options), written(model, prompts(), **options))


def share_of_full_layer(fast):
    head = fast.get_output_embeddings()
    products, forward = [], torch.nn.Linear.forward

    def counted(layer, hidden):
        products.extend([1] * (layer is head.head))
        return forward(layer, hidden)

    before = head.stats()
    with patch.object(torch.nn.Linear, "forward", counted):  # a hook would leave all calls to the layer
        written(fast, prompts(6), num_beams=4, eos_token_id=None)
    after = head.stats()
    rows = after["rows"] - before["rows"]
    return (after["full_layer"].get("not proven", 0) - before["full_layer"].get("not proven", 0)) / rows, len(products)


def test_before_their_end_steep_texts_need_no_full_layer():
    _, fast = pair_of(gpt2(25.0, 8.0, 1))
    share, products = share_of_full_layer(fast)
    assert share < 0.6
    assert products == 1
    head = fast.get_output_embeddings()
    assert head.stats()["memory_bytes"] > head.decoder.stats()["memory_bytes"]


def test_where_bounds_leave_most_open_a_step_is_one_product():
    _, fast = pair_of(gpt2(10.0, 4.0, 0))
    share, products = share_of_full_layer(fast)
    assert share > 0.8
    assert products <= 12 + 8  # the first steps try bounds


def test_texts_end_of_themselves(pair):
    model, _ = pair
    texts = written(model, prompts(8), num_beams=4)
    assert 1 < int((texts[:, 5:] != 0).sum(1).max()) < 12


def test_words_that_an_encoder_decoder_forces(pair):
    model, fast = pair_of(bart())
    for beams in (2, 4):
        assert torch.equal(written(fast, prompts(), num_beams=beams), written(model, prompts(), num_beams=beams))
    assert set(fast.get_output_embeddings().stats()["full_layer"]) <= {"not proven"}


def test_other_processors_take_the_full_layer(pair):
    model, fast = pair
    options = {"num_beams": 3, "repetition_penalty": 1.3}
    assert torch.equal(written(fast, prompts(), **options), written(model, prompts(), **options))
    assert fast.get_output_embeddings().stats()["full_layer"]["num_beams and RepetitionPenaltyLogitsProcessor"] > 0


def test_changed_weights_are_coded_again():
    model, fast = pair_of(gpt2(25.0, 8.0, 4))
    written(fast, prompts(), num_beams=3)
    with torch.no_grad():
        for one in (model, fast):
            one.get_output_embeddings().weight.neg_()
    assert torch.equal(written(fast, prompts(), num_beams=3), written(model, prompts(), num_beams=3))


def test_a_proof_makes_the_choices_of_exact_sums():
    random = torch.Generator().manual_seed(0)

    def uniform(*shape):
        return torch.rand(shape, dtype=torch.float64, generator=random)

    for _ in range(40):
        exact = 3 * uniform(24)
        proof = Proof(lambda states, exact=exact: exact[states[:, 0].long()])
        numbers = proof.add(torch.arange(24.0)[:, None], exact - 0.3 * uniform(24), exact + 0.3 * uniform(24))
        ways = numbers[torch.randint(24, (3, 4, 2), generator=random)]
        totals, lengths = 5 * uniform(3, 4, 6), 1 + uniform(3, 4)
        keeps = [1, 5, 3]
        scores = ((totals - exact[ways - 1].sum(2)[..., None]) / lengths[..., None]).reshape(3, -1)
        found = proof.best(totals, ways, keeps, lengths)
        for row, keep in enumerate(keeps):
            assert set(found[row, :keep].tolist()) == set(scores[row].topk(keep).indices.tolist())
            assert (found[row, keep:] == -1).all()
        assert proof.settled < 24
        proof.keep(ways[:1])
        proof.settle(ways[:1])
        low, high = proof.bounds(ways[:1])
        assert torch.equal(low, high)
