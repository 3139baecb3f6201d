"""Tells if an output layer is still the one that a decoder was made of: its numbers, and code that changes them."""

import hashlib

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["digest_of", "is_computed", "is_hooked", "state_of", "unlike"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_TOGETHER = 1024  # numbers of eight bytes
_OF_ALL_MODULES = vars(torch.nn.modules.module)


def state_of(head: nn.Linear) -> list[tuple[int, int]]:
    """Return addresses and versions of the layer's numbers, which change when code replaces or writes most of them."""
    # torch has no public name for the version of a tensor.
    return [(part.data_ptr(), -1 if part.is_inference() else part._version) for part in _parts(head)]


def digest_of(head: nn.Linear) -> bytes:
    """Return a digest of the layer's numbers, which tells of writes that have no version.

    It reads each number once. The sums that it is made of are multilinear with odd multipliers: a change of eight bytes
    never keeps a sum, other changes keep one time in about 2**32.
    """
    odd = np.random.default_rng(0).integers(0, 2**63, _TOGETHER, np.uint64) * np.uint64(2) + np.uint64(1)
    hasher = hashlib.blake2b(digest_size=16)
    for part in _parts(head):
        raw = part.detach().contiguous().view(torch.uint8).numpy().reshape(-1)
        whole = len(raw) - len(raw) % (8 * _TOGETHER)
        hasher.update(np.einsum("ij,j->i", raw[:whole].view(np.uint64).reshape(-1, _TOGETHER), odd).data)
        hasher.update(raw[whole:].data)
    return hasher.digest()


def is_hooked(*modules: nn.Module) -> bool:
    """Say if a hook, or a method of its own, takes part in a call of one of the modules, or a hook in those of all."""
    kinds = ("forward_hooks", "forward_pre_hooks")  # torch has no public names for them
    for_all = any(_OF_ALL_MODULES[f"_global_{kind}"] for kind in kinds)
    return for_all or any("forward" in own or any(own[f"_{kind}"] for kind in kinds) for own in map(vars, modules))


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
