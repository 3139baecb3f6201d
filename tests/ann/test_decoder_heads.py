"""Output layers opened from .safetensors files: the same numbers, names, shards, and files that lie."""

import json
import struct

import numpy as np
import pytest

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file

from memhier.ann import LogitIndex, TopKSoftmax, open_head  # noqa: E402
from memhier.ann.decoder.safetensors import find_tensors  # noqa: E402
from memhier.errors import MemhierError  # noqa: E402

WORDS, DIMENSION = 300, 20


def tensors_of(dtype=torch.bfloat16, name="lm_head.weight"):
    random = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(WORDS, DIMENSION, generator=random).to(dtype),
        "model.norm.weight": torch.ones(DIMENSION).to(dtype),
        "model.layers.0.mlp.weight": torch.randn(7, DIMENSION, generator=random),
    }


def write_shards(folder, tensors):
    """Write each tensor into a shard of its own."""
    places = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        places[name] = f"model-{number + 1:05}-of-{len(tensors):05}.safetensors"
        save_file({name: tensor}, folder / places[name])
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": places}))
    return index


def write_raw(path, header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["file", "folder", "index", "folder of shards"])
def test_the_layer_has_the_numbers_of_the_file(tmp_path, dtype, form):
    tensors = tensors_of(dtype)
    place = tmp_path
    if "shards" in form or form == "index":
        index = write_shards(tmp_path, tensors)
        place = index if form == "index" else tmp_path
    else:
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        place = tmp_path / "model.safetensors" if form == "file" else tmp_path
    layer = open_head(place)
    assert isinstance(layer, torch.nn.Linear)
    assert layer.weight.dtype == dtype
    assert not layer.weight.requires_grad
    assert layer.bias is None
    assert torch.equal(layer.weight, tensors["lm_head.weight"])
    named = open_head(place, "model.layers.0.mlp.weight")
    assert torch.equal(named.weight, tensors["model.layers.0.mlp.weight"])
    hidden = torch.randn(2, DIMENSION).to(dtype)
    assert torch.equal(layer(hidden), torch.nn.functional.linear(hidden, tensors["lm_head.weight"]))


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "transformer.wte.weight", "shared.weight", "wte.weight"])
def test_tied_embeddings_stand_for_a_layer_that_is_not_there(tmp_path, name):
    tensors = tensors_of(name=name)
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(open_head(tmp_path).weight, tensors[name])
    own = torch.randn(WORDS, DIMENSION).bfloat16()
    save_file(tensors | {"lm_head.weight": own}, tmp_path / "model.safetensors")
    assert torch.equal(open_head(tmp_path).weight, own)


def test_a_bias_comes_with_its_weight(tmp_path):
    bias = torch.randn(WORDS).bfloat16()
    write_shards(tmp_path, tensors_of() | {"lm_head.bias": bias})
    assert torch.equal(open_head(tmp_path).bias, bias)
    save_file(tensors_of() | {"lm_head.bias": bias[1:].clone()}, tmp_path / "one.safetensors")
    with pytest.raises(ValueError, match=r"'lm_head.bias' has shape \[299\]: expected \[300\]"):
        open_head(tmp_path / "one.safetensors")


def test_names_that_are_not_there_or_not_clear(tmp_path):
    save_file(tensors_of(name="head"), tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"no tensor 'lm_head.weight': expected one of 'head', 'model.layers"):
        open_head(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="no tensor 'decoder': expected one of 'head'"):
        open_head(tmp_path / "a.safetensors", "decoder")
    with pytest.raises(ValueError, match=r"'model.norm.weight' has shape \[20\]: expected \[V, D\]"):
        open_head(tmp_path / "a.safetensors", "model.norm.weight")
    two = tensors_of(name="a.embed_tokens.weight") | tensors_of(name="b.embed_tokens.weight")
    save_file(two, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"may mean 'a\.embed_tokens\.weight', 'b\.embed_tokens\.weight'"):
        open_head(tmp_path / "b.safetensors")
    save_file({"lm_head.weight": torch.zeros(4, 4, dtype=torch.int8)}, tmp_path / "c.safetensors")
    with pytest.raises(TypeError, match=r"'lm_head\.weight' is I8: expected F32, F16 or BF16"):
        open_head(tmp_path / "c.safetensors")


def test_writing_to_the_layer_leaves_the_file_alone(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(tensors_of(), path)
    before = path.read_bytes()
    layer = open_head(path)
    layer.weight.data.zero_()
    assert path.read_bytes() == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_decoder_shares_the_map_and_adds_up_in_single_precision(tmp_path, dtype):
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(2_000, 48, generator=random).to(dtype)
    save_file({"lm_head.weight": weight}, tmp_path / "model.safetensors")
    hidden = torch.randn(900, 48, generator=random) @ torch.randn(48, 48, generator=random) / 7
    layer = open_head(tmp_path)
    decoder = TopKSoftmax.from_linear(layer, k=10, contexts=hidden[:800], method="graph")
    apart = TopKSoftmax.from_linear(layer, k=10, contexts=hidden[:800], method="graph").index.layer
    assert np.shares_memory(decoder.index.layer.weight, layer.weight.view(torch.int16).numpy())
    assert not apart.owned
    copied = LogitIndex.build(weight.float().numpy(), contexts=hidden[:800].numpy(), method="graph")
    assert abs(decoder.index.memory_bytes - copied.memory_bytes) < 2**16  # neither counts rows, which are shared
    asked = hidden[800:]
    exact = asked.double() @ weight.double().T
    # Answers without a proof are the layer's own, which are half as precise as its numbers.
    proven = decoder.certified_topk(asked)[2]
    every = torch.ones(len(asked), dtype=torch.bool)
    three = decoder.topk(asked.reshape(10, 10, 48))
    for (values, words), right in (
        (decoder.topk(asked), every),
        (decoder.certified_topk(asked)[:2], proven),
        (three, every),
    ):
        expected = exact.gather(1, words.reshape(-1, 10))
        lost = (values.reshape(-1, 10) - expected)[right].abs().max()
        assert lost < 1e-5 * expected.abs().max()  # a sum in half precision loses 100 times more
    # Positions of one call are answered as alone.
    assert torch.equal(three[1][3, 4], decoder.topk(asked[34:35])[1][0])


def test_numpy_takes_the_map_as_well(tmp_path):
    save_file(tensors_of(), tmp_path / "model.safetensors")
    head = find_tensors(tmp_path)["lm_head.weight"]
    index = LogitIndex.build(head.map(), dtype=head.dtype)
    assert index.layer is not None
    assert not index.layer.owned


GOOD = {"dtype": "F16", "shape": [3, 2], "data_offsets": [0, 12]}
LIES = {
    "empty": b"",
    "no json": b"nothing like a header",
    "a list": [],
    "text": {"lm_head.weight": "F16"},
    "no offsets": {"lm_head.weight": {"dtype": "F16", "shape": [3, 2]}},
    "negative": {"lm_head.weight": GOOD | {"shape": [-3, -2]}},
    "a fraction": {"lm_head.weight": GOOD | {"shape": [3.0, 2]}},
    "true": {"lm_head.weight": GOOD | {"shape": [True, 6]}},
    "another shape": {"lm_head.weight": GOOD | {"shape": [3, 3]}},
    "huge": {"lm_head.weight": GOOD | {"shape": [2**40, 2**40]}},
    "backwards": {"lm_head.weight": GOOD | {"data_offsets": [12, 0]}},
    "beyond": {"lm_head.weight": GOOD | {"data_offsets": [2, 14]}},
    "far beyond": {"lm_head.weight": GOOD | {"data_offsets": [2**61, 2**61 + 12]}},
    "metadata": {"__metadata__": {"a": 1}, "lm_head.weight": GOOD},
    "a tensor of words": {"lm_head.weight": {"format": "pt"}},
    "nested": b'{"a":' * 100_000,
}


@pytest.mark.parametrize("kind", sorted(LIES))
def test_a_header_is_not_believed(tmp_path, kind):
    path = write_raw(tmp_path / "model.safetensors", LIES[kind], bytes(12))
    with pytest.raises(MemhierError, match=r"model\.safetensors"):
        open_head(path)


@pytest.mark.parametrize("length", [2**64 - 1, 2**40, 10_000])
def test_the_length_of_a_header_is_not_believed(tmp_path, length):
    path = write_raw(tmp_path / "model.safetensors", {"lm_head.weight": GOOD}, bytes(12), length)
    with pytest.raises(MemhierError, match=r"no \.safetensors file"):
        open_head(path)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"lm_head.weight": torch.randn(3, 2)}, path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(MemhierError):
            open_head(path)


def test_numbers_at_an_odd_byte_are_refused(tmp_path):
    header = json.dumps({"lm_head.weight": GOOD}).encode()
    header += b" " * (len(header) % 2 == 0)
    path = write_raw(tmp_path / "model.safetensors", header, bytes(12))
    with pytest.raises(MemhierError, match="expected a multiple of 2"):
        open_head(path)


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "a/b", "..", "", "a\x00b", 7])
def test_an_index_names_files_beside_it_alone(tmp_path, shard):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))
    with pytest.raises(MemhierError, match="weight_map"):
        open_head(index)


def test_an_index_that_misplaces_a_tensor(tmp_path):
    index = write_shards(tmp_path, tensors_of())
    places = json.loads(index.read_text())["weight_map"]
    first, second, _ = places.values()
    index.write_text(json.dumps({"weight_map": places | {"lm_head.weight": second}}))
    with pytest.raises(MemhierError, match=f"'lm_head.weight' in {second}, which does not hold it"):
        open_head(tmp_path)
    index.write_text(json.dumps({"weight_map": places}))
    (tmp_path / first).unlink()
    with pytest.raises(FileNotFoundError, match=first):
        open_head(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nowhere"):
        open_head(tmp_path / "nowhere.safetensors")


def test_tensors_that_numpy_cannot_read_are_refused_with_advice():
    weight, states = torch.randn(WORDS, DIMENSION).bfloat16(), torch.randn(70, DIMENSION)
    with pytest.raises(TypeError, match=r"weight: .*Tensor of torch.bfloat16 .*view\(torch.uint16\)"):
        LogitIndex.build(weight, contexts=states.numpy())
    rows = weight.detach().view(torch.uint16).numpy()  # the advice
    index = LogitIndex.build(rows, dtype="bfloat16", contexts=states.numpy(), k=3)
    with pytest.raises(TypeError, match=r"hidden: .* of torch.bfloat16 .* hidden.float\(\).numpy\(\)"):
        index.topk(states.bfloat16())
    with pytest.raises(TypeError, match=r"contexts: .* of torch.bfloat16"):
        LogitIndex.build(rows, dtype="bfloat16", contexts=states.bfloat16())
    assert index.topk(states[:2].bfloat16().float().numpy()).indices.shape == (2, 3)
