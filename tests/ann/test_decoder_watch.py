"""An accelerated model writes its own text after code has written to its output layer, changed it, or wrapped it."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

from torch import nn  # noqa: E402
from torch.nn.modules import module as modules  # noqa: E402
from torch.nn.utils import parametrizations, parametrize, prune  # noqa: E402

from memhier.ann.decoder.module.huggingface import AcceleratedHead, accelerate, undo  # noqa: E402
from memhier.ann.decoder.module.watch import digest_of  # noqa: E402

WORDS = 300
ROWS = torch.tensor([5, 77, 201])  # none of every nineteenth
pytestmark = pytest.mark.filterwarnings("ignore:.*hidden states are unlike the contexts")


def words(rows, length, seed):
    return torch.randint(3, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["tied", "untied"])
def pair(request):
    """A model that is accelerated and has written a text, and the same one as it was."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=64, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1,
        initializer_range=0.3, tie_word_embeddings=request.param == "tied",
    )  # fmt: skip
    plain = transformers.GPT2LMHeadModel(config).eval()
    fast = accelerate(copy.deepcopy(plain), k=40, input_ids=words(20, 24, 9), certify=True, method="preview")
    generate(fast)
    return fast, plain


def generate(model, **options):
    text = words(3, 6, 5)
    given = {"do_sample": False, "eos_token_id": None, "pad_token_id": 2, "max_new_tokens": 8} | options
    return model.generate(text, attention_mask=torch.ones_like(text), **given)


def counted(model):
    return model.get_output_embeddings().stats()["full_layer"]


def check(fast, plain):
    for options in ({}, {"num_beams": 3}, {"repetition_penalty": 1.3}):
        assert torch.equal(generate(fast, **options), generate(plain, **options)), options


def negated(model):
    model.get_output_embeddings().weight.data[ROWS] *= -1


def raised(model):
    rows = torch.randn(3, 32, generator=torch.Generator().manual_seed(3))
    model.get_output_embeddings().weight.data[ROWS] += 3 * rows


def raised_by_numpy(model):
    model.get_output_embeddings().weight.detach().numpy()[ROWS.numpy()] *= 3


def changed_columns(model):
    model.get_output_embeddings().weight.data[:, [3, 4]] = model.get_output_embeddings().weight.data[:, [4, 3]]


def scaled_by_type(model):
    for part in model.modules():
        if isinstance(part, nn.Linear):
            part.weight.data.mul_(1.5)


@pytest.mark.parametrize("write", [negated, raised, raised_by_numpy, changed_columns, scaled_by_type])
def test_writes_of_any_rows_without_a_version_are_seen_by_the_next_call(pair, write):
    for model in pair:
        write(model)
    check(*pair)
    assert set(counted(pair[0])) <= {"not proven"}


def test_tied_embeddings_are_written_to_by_their_own_name(pair):
    for model in pair:
        model.get_input_embeddings().weight.data[ROWS] *= -3
    check(*pair)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(300, 7), (1, 1), (2048, 33)])
def test_a_digest_tells_of_each_bit_and_of_places(dtype, shape):
    torch.manual_seed(0)
    layer = nn.Linear(shape[1], shape[0]).to(dtype)
    seen, places = {digest_of(layer)}, {(0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, 0)}
    for row, column in places:
        before = layer.weight.data[row, column].clone()
        layer.weight.data[row, column] = torch.nextafter(before, before + 1)
        seen.add(digest_of(layer))
        layer.weight.data[row, column] = before
    layer.bias.data[-1] += 1
    seen.add(digest_of(layer))
    layer.bias.data[-1] -= 1
    assert len(seen) == len(places) + 2
    if shape[0] > 1:
        layer.weight.data[[0, 1]] = layer.weight.data[[1, 0]]
        assert digest_of(layer) not in seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_digest_tells_of_signs_and_powers_of_two(dtype):
    """The bits that products of words lose first: two of them must not cancel, whatever their places."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 4000).to(dtype)
    before = digest_of(layer)
    for columns in ([1, 3], [3, 7], [1, 33], [0, 2], [0, 1, 2, 3], list(range(1, 64, 2))):
        for rows in ([9], [9, 10], slice(0, 2000), slice(0, 4000, 8), slice(None)):
            part = (torch.arange(4000)[rows, None], torch.tensor(columns))
            for factor in (-1.0, 2.0):
                layer.weight.data[part] *= factor
                assert digest_of(layer) != before, (columns, rows, factor)
                layer.weight.data[part] /= factor
    assert digest_of(layer) == before


class Rising(nn.Module):
    def forward(self, weight):
        return weight * torch.linspace(-2, 2, WORDS)[:, None]


def offload(layer):
    """Keep the weights elsewhere but for the time of a call, as libraries do that spare memory."""
    weight, forward = layer.weight, layer.forward

    def load(hidden):
        layer.weight = weight
        try:
            return forward(hidden)
        finally:
            layer.weight = nn.Parameter(weight.to("meta"), requires_grad=False)

    layer.forward = load
    layer.weight = nn.Parameter(weight.to("meta"), requires_grad=False)


CHANGES = {
    "parametrization": (lambda layer: parametrize.register_parametrization(layer, "weight", Rising()), "computed"),
    "weight norm": (lambda layer: parametrizations.weight_norm(layer).parametrizations.weight[0], "computed"),
    "mask": (lambda layer: prune.l1_unstructured(layer, "weight", 0.7), "hooks of the layer"),
    "bias": (lambda layer: setattr(layer, "bias", nn.Parameter(torch.linspace(-9, 9, WORDS))), ""),
    "parametrized bias": (
        lambda layer: parametrize.register_parametrization(
            setattr(layer, "bias", nn.Parameter(torch.linspace(-9, 9, WORDS))) or layer, "bias", nn.Tanh()
        ), "computed",
    ),
    "offloaded": (offload, "hooks of the layer"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_changes_otherwise_is_taken_as_it_is(pair, change):
    make, reason = CHANGES[change]
    for model in pair:
        make(model.get_output_embeddings())
    assert set(pair[0].state_dict()) == set(pair[1].state_dict())
    check(*pair)
    assert any(reason in each for each in counted(pair[0])) or not reason


def test_a_parametrization_trains_as_in_the_layer_and_is_removed_before_undo(pair):
    found = []
    for model in pair:
        parametrize.register_parametrization(model.get_output_embeddings(), "weight", Rising())
        text = words(2, 9, 1)
        model(text, labels=text).loss.backward()
        found.append({name: part.grad for name, part in model.named_parameters()})
    torch.testing.assert_close(*found, rtol=0, atol=0)
    fast, plain = pair
    with pytest.raises(ValueError, match="has a parametrization, a mask or a forward of its own; remove it first"):
        undo(fast)
    with pytest.raises(TypeError, match="the weights of its output layer are computed from others"):
        accelerate(plain, input_ids=words(20, 24, 9))
    for model in pair:
        parametrize.remove_parametrizations(model.get_output_embeddings(), "weight")
    check(fast, plain)
    assert set(counted(fast)) <= {"not proven"}
    check(undo(fast), plain)


@pytest.mark.parametrize("before", [False, True])
def test_hooks_of_all_modules_change_the_layer_once(pair, before):
    def is_of_words(part):
        return isinstance(part, nn.Linear) and len(part.weight) == WORDS

    def change(part, _, logits):
        return logits + torch.linspace(-9, 9, WORDS) if is_of_words(part) else None

    def change_input(part, inputs):
        return (inputs[0] * torch.linspace(-2, 2, 32),) if is_of_words(part) else None

    register = modules.register_module_forward_hook
    hook = modules.register_module_forward_pre_hook(change_input) if before else register(change)
    try:
        check(*pair)
        text = words(2, 9, 1)
        assert torch.equal(*(model(text).logits for model in pair))
    finally:
        hook.remove()
    assert set(counted(pair[0])) - {"not proven"} == {"hooks of the layer"}
    check(*pair)


def test_hooks_of_the_layer_and_of_all_modules_both_take_part(pair):
    def raise_some(_, __, logits):
        return logits + torch.linspace(-9, 9, WORDS)

    undo(pair[0])
    for model in pair:
        model.get_output_embeddings().register_forward_hook(raise_some)
    with pytest.warns(UserWarning, match="its logits are not those of its output layer"):
        accelerate(pair[0], k=40, input_ids=words(20, 24, 9))
    seen = []
    hook = modules.register_module_forward_hook(lambda part, _, __: seen.append(part))
    try:
        check(*pair)
    finally:
        hook.remove()
    assert any(isinstance(each, AcceleratedHead) for each in seen)
    check(*pair)


def test_undo_keeps_later_hooks_and_modes_of_the_layer(pair):
    grown = []
    for model in pair:
        model.get_output_embeddings().register_forward_hook(lambda _, __, logits: logits + torch.linspace(-9, 9, WORDS))
        model.get_output_embeddings().register_full_backward_hook(lambda *_: grown.append(1))
        model.train()
    fast, plain = undo(pair[0]), pair[1]
    assert fast.get_output_embeddings().training
    for model in (fast, plain):
        model(words(2, 9, 1)).logits.sum().backward()
    assert len(grown) == 2
    check(fast.eval(), plain.eval())


def test_a_forward_that_calls_the_stand_in_is_removed_before_undo(pair):
    offload(pair[0].get_output_embeddings())
    with pytest.raises(ValueError, match="or a forward of its own; remove it first"):
        undo(pair[0])


def add(logits):
    return logits + torch.linspace(-9, 9, WORDS)


def add_in_hook(model):
    def change(_, __, output):
        output.logits = add(output.logits)
        return output

    return model.register_forward_hook(change).remove


def add_in_forward(model):
    before = model.forward

    def forward(*arguments, **options):
        output = before(*arguments, **options)
        output.logits = add(output.logits)
        return output

    model.forward = forward
    return lambda: delattr(model, "forward")


@pytest.mark.parametrize("change", [add_in_hook, add_in_forward])
def test_code_that_changes_logits_of_the_model_later_takes_the_full_layer(pair, change):
    ends = [change(model) for model in pair]
    check(*pair)
    assert set(counted(pair[0])) - {"not proven"} == {"logits changed otherwise than at first"}
    rows = counted(pair[0])["logits changed otherwise than at first"]
    for end in ends:
        end()
    check(*pair)
    assert counted(pair[0])["logits changed otherwise than at first"] == rows
    pair[0].forward = torch.compile(pair[0].forward, backend="eager")
    check(*pair)
    assert counted(pair[0])["logits changed otherwise than at first"] == rows


@pytest.mark.parametrize(
    ("family", "place", "name", "value"),
    [
        ("Gemma2", "config", "final_logit_softcapping", 0.5),
        ("Gemma2", "config", "final_logit_softcapping", None),
        ("Granite", "config", "logits_scaling", 0.1),
        ("Cohere", "", "logit_scale", 3.0),
    ],
)
def test_scales_and_caps_that_are_set_later_count(family, place, name, value):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=WORDS, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=16,
        num_key_value_heads=2, bos_token_id=0, eos_token_id=1, pad_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    accelerate(model, k=8, input_ids=words(20, 24, 9), method="preview")
    first, before = words(1, 6, 5), getattr(getattr(model, place) if place else model, name)
    for number, reasons in ((value, {"logits changed otherwise than at first"}), (before, set())):
        setattr(getattr(model, place) if place else model, name, number)
        expected = 4000 * model(first).logits[0, -1].detach().double().softmax(-1)
        rows = dict(counted(model))
        torch.manual_seed(1)
        drawn = model.generate(first, do_sample=True, top_k=0, max_new_tokens=1, num_return_sequences=4000)[:, -1]
        assert ((torch.bincount(drawn, minlength=WORDS) - expected).abs() < 6 * expected.sqrt() + 6).all()
        assert {name for name, count in counted(model).items() if count != rows.get(name)} == reasons


def test_a_dtype_without_codes_takes_the_full_layer(pair):
    for model in pair:
        model.double()
    check(*pair)
    assert set(counted(pair[0])) == {"weights of torch.float64 on cpu"}
    for model in pair:
        model.float()
    check(*pair)
    assert set(counted(pair[0])) <= {"weights of torch.float64 on cpu", "not proven"}


def test_more_words_take_the_full_layer_until_the_model_is_accelerated_again(pair):
    fast, plain = pair
    rows = {}
    for model in pair:
        torch.manual_seed(3)
        model.resize_token_embeddings(WORDS + 9)
        rows[model] = model.get_output_embeddings().weight
    assert torch.equal(rows[fast], rows[plain])
    check(fast, plain)
    if isinstance(fast.get_output_embeddings(), AcceleratedHead):
        assert set(counted(fast)) == {"weights of another shape"}
        undo(fast)
    check(accelerate(fast, k=40, input_ids=words(20, 24, 9), certify=True, method="preview"), plain)
    assert set(counted(fast)) <= {"not proven"}


def test_an_adapter_wraps_the_layer_as_any_other(pair):
    class Adapter(nn.Module):
        def __init__(self, layer):
            super().__init__()
            assert isinstance(layer, nn.Linear)
            self.layer, self.more = layer, nn.Linear(layer.in_features, layer.out_features)
            self.weight = layer.weight

        def forward(self, hidden):
            return self.layer(hidden) + self.more(hidden)

    layers = []
    for model in pair:
        torch.manual_seed(1)
        layers.append(model.get_output_embeddings())
        model.set_output_embeddings(Adapter(layers[-1]))
    check(*pair)
    assert set(layers[0].stats()["full_layer"]) == {"a call that is not of generate"}
    for model, layer in zip(pair, layers, strict=True):
        layer.weight.data.add_(model.get_output_embeddings().more.weight.data)
        model.set_output_embeddings(layer)
    check(*pair)
    model.set_output_embeddings(Adapter(layer))
    with pytest.raises(TypeError, match=r"its output layer is .*Adapter; expected a torch.nn.Linear. Merge adapters"):
        accelerate(model, input_ids=words(20, 24, 9))


def test_parts_of_the_layer_stay_parts_of_the_model(pair):
    class Gated(nn.Linear):
        def __init__(self):
            super().__init__(32, WORDS)
            self.more = nn.Linear(32, WORDS)
            self.register_buffer("gate", torch.rand(WORDS))
            self.register_buffer("passing", torch.rand(WORDS), persistent=False)

        def forward(self, hidden):
            return super().forward(hidden) + self.gate * self.more(hidden)

    plain = pair[1]
    plain.set_output_embeddings(Gated())
    fast = copy.deepcopy(plain)
    with pytest.warns(UserWarning, match="its logits are not those of its output layer"):
        accelerate(fast, k=40, input_ids=words(20, 24, 9), certify=True, method="preview")
    assert set(fast.state_dict()) == set(plain.state_dict())
    assert "lm_head.passing" not in fast.state_dict()
    check(fast.bfloat16(), plain.bfloat16())


def test_beams_begin_with_embeddings_in_place_of_words(pair):
    for options in ({}, {"num_beams": 3}):
        fast, plain = (
            model.generate(
                inputs_embeds=model.get_input_embeddings()(words(3, 6, 5)), attention_mask=torch.ones(3, 6).long(),
                do_sample=False, max_new_tokens=8, eos_token_id=None, pad_token_id=2, **options,
            )
            for model in pair
        )  # fmt: skip
        assert torch.equal(fast, plain), options
