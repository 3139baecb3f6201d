"""The output layer of a model's .safetensors files as a module of PyTorch."""

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from memhier.ann.decoder.safetensors import StoredTensor, find_tensors

__all__ = ["open_head"]

# By the ends of their names, as a multimodal model has prefixes. Embeddings are the layer's own where it has none.
_HEADS = ("lm_head.weight", "embed_out.weight")
_EMBEDDINGS = ("shared.weight", "embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_SHOWN = 8


def open_head(path: str | os.PathLike[str], name: str | None = None) -> nn.Linear:
    """Return the output layer of a model from its .safetensors files, without its other weights.

    The weights are mapped, not read: they take no memory beyond the system's file cache, which a model that maps the
    same file shares. A decoder made of the layer holds codes and links besides. Do not change the file meanwhile.

    Parameters
    ----------
    path
        A model's folder, a .safetensors file, or an index of shards (``model.safetensors.index.json``).
    name
        The tensor ``[V, D]``. If None, ``lm_head.weight``, or the token embeddings of a model that ties them, such as
        ``model.embed_tokens.weight``. A tensor of that name with ``bias`` in place of ``weight`` is the bias.

    Returns
    -------
    torch.nn.Linear
        Without gradients, in the dtype of the file: float32, float16 or bfloat16.

    Raises
    ------
    FileNotFoundError
        If a file is missing.
    FormatError, CorruptionError
        If a file is damaged.
    TypeError, ValueError
        If there is no such tensor, or several may be meant, or it has another shape or dtype; the message lists names.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from safetensors.torch import save_file
    >>> from memhier.ann import TopKSoftmax, open_head
    >>> folder = tempfile.mkdtemp()
    >>> _ = torch.manual_seed(0)
    >>> save_file({"lm_head.weight": torch.randn(1000, 32).bfloat16()}, folder + "/model.safetensors")
    >>> lm_head = open_head(folder)
    >>> decoder = TopKSoftmax.from_linear(lm_head, k=5)
    >>> bool(decoder.topk(lm_head.weight[[7]])[1][0, 0] == 7)
    True
    """
    tensors = find_tensors(path)
    head = tensors[name] if name in tensors else _choose(tensors, name, path)
    if len(head.shape) != 2 or 0 in head.shape:
        raise ValueError(f"{head.path}: tensor {head.name!r} has shape {list(head.shape)}: expected [V, D]")
    words, dimension = head.shape
    prefix, _, last = head.name.rpartition("weight")
    about_bias = tensors.get(f"{prefix}bias") if not last else None
    if about_bias is not None and about_bias.shape != (words,):
        raise ValueError(f"{about_bias.path}: tensor {about_bias.name!r} has shape {list(about_bias.shape)}: "
                         f"expected [{words}] as {head.name!r} has rows")  # fmt: skip
    weight = _tensor_of(head)
    layer = nn.Linear(dimension, words, bias=about_bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if about_bias is not None:
        layer.bias = nn.Parameter(_tensor_of(about_bias).to(weight.dtype), requires_grad=False)
    return layer


def _choose(tensors: dict[str, StoredTensor], name: str | None, path: Any) -> StoredTensor:
    """Return the output layer among a model's tensors."""
    if name is None:
        for known in (*_HEADS, *_EMBEDDINGS):
            found = [each for each in tensors if each == known or each.endswith(f".{known}")]
            if len(found) == 1:
                return tensors[found[0]]
            if found:
                raise ValueError(f"{path}: name=None may mean {_shown(found)}: name one of them")
    matrices = [each for each, about in tensors.items() if len(about.shape) == 2]
    largest = sorted(matrices, key=lambda each: -max(tensors[each].shape))
    raise ValueError(f"{path}: holds no tensor {name or _HEADS[0]!r}: expected one of {_shown(largest)}")


def _shown(names: list[str]) -> str:
    return ", ".join(map(repr, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")


def _tensor_of(about: StoredTensor) -> Tensor:
    """Return the numbers of a file as a tensor that shares its map."""
    numbers = about.map()
    if about.dtype != "bfloat16":
        return torch.from_numpy(numbers)
    halves: npt.NDArray[np.int16] = numbers.view(np.int16)
    return torch.from_numpy(halves).view(torch.bfloat16)
