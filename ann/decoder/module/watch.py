"""Tells if an output layer is still the one that a decoder was made of: its numbers, and code that changes them."""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from memhier import backend

__all__ = ["digest_of", "is_computed", "is_hooked", "marks_of", "state_of", "unlike"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_HOOKS = ("forward_hooks", "forward_pre_hooks")  # torch has no public names for them
# The names of scales and caps after the output layer in models of transformers.
_SCALES = (
    "final_logit_softcapping", "lm_head_multiplier", "logit_scale", "logits_scaling", "output_multiplier", "softcap",
)  # fmt: skip
_OF_ALL_MODULES = vars(torch.nn.modules.module)


def state_of(head: nn.Linear) -> list[tuple[int, int]]:
    """Return addresses and versions of the layer's numbers, which change when code replaces or writes most of them."""
    # torch has no public name for the version of a tensor.
    return [(part.data_ptr(), -1 if part.is_inference() else part._version) for part in _parts(head)]


def digest_of(head: nn.Linear) -> bytes:
    """Return a digest of the layer's numbers, which tells of writes that have no version.

    It reads each number once; a change keeps it one time in about 2**64.
    """
    return b"".join(_hash_of(part.detach().contiguous().view(torch.uint8).numpy().reshape(-1)) for part in _parts(head))


def is_hooked(*modules: nn.Module) -> bool:
    """Say if a hook, or a method of its own, takes part in a call of one of the modules, or a hook in those of all."""
    for_all = any(_OF_ALL_MODULES[f"_global_{kind}"] for kind in _HOOKS)
    return for_all or any("forward" in own or any(own[f"_{kind}"] for kind in _HOOKS) for own in map(vars, modules))


def marks_of(model: Any) -> list[object]:
    """Return the scales and caps of a model, and marks of code on it, which tell if it changes logits as before."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else None
    places = (model, getattr(model, "base_model", None), config, text)
    found = [getattr(place, name, None) for place in places for name in _SCALES]
    forward = model.forward
    called = getattr(forward, "_torchdynamo_orig_callable", forward)  # a compiled one does the same
    own = called is forward and "forward" in vars(model)
    hooks = [number for kind in _HOOKS for number in vars(model)[f"_{kind}"]]
    numbers = [each if isinstance(each, int | float) else None for each in found]
    return [*numbers, own, getattr(called, "__qualname__", ""), hooks]


def is_computed(head: nn.Linear) -> bool:
    """Say if the layer's numbers are no plain parameters, but made of others by a parametrization, a mask or a code."""
    own = dict(head.named_parameters(recurse=False))
    bias = getattr(head, "bias", own)  # not there if it was taken out
    return type(own.get("weight")) is not nn.Parameter or not (bias is None or type(own.get("bias")) is nn.Parameter)


def unlike(head: nn.Linear, shape: tuple[int, int]) -> str:
    """Return the reason why no decoder of a shape answers from the layer; empty if there is none."""
    if is_computed(head):
        return "weights that are computed"
    weight = head.weight
    if weight.dtype not in _DTYPES or weight.device.type != "cpu":
        return f"weights of {weight.dtype} on {weight.device}"
    return "" if weight.shape == shape else "weights of another shape"


def _parts(head: nn.Linear) -> list[Tensor]:
    return [head.weight] if head.bias is None else [head.weight, head.bias]


def _hash_of(raw: npt.NDArray[np.uint8]) -> bytes:
    if backend.core is None:
        return hashlib.blake2b(raw.data, digest_size=8).digest()
    found = np.empty(1, np.int64)
    backend.core.hash_words(words=raw, ends=np.array([len(raw)]), hashes=found)
    return found.tobytes()
