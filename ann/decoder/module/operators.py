"""Operators of torch that call a module in place of its tensors, so that `torch.compile` and `torch.export` keep it.

A graph holds the number of a module of this process. A program that was exported runs where the module lives.
"""

import os
import weakref
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Called", "enrol", "logits", "topk"]


class Called(Protocol):
    """A module that the operators call."""

    def topk(self, hidden: Tensor, k: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the k largest logits, float32, and their words."""
        ...

    def all_logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[..., V]`` in the dtype of `hidden`."""
        ...


_modules: weakref.WeakValueDictionary[int, Called] = weakref.WeakValueDictionary()
_NUMBER_BYTES = 7


def enrol(module: Called) -> int:
    """Return a number by which the operators know a module for as long as it lives; no other process gives the same."""
    number = int.from_bytes(os.urandom(_NUMBER_BYTES), "little")
    _modules[number] = module
    return number


def _called(number: int) -> Called:
    module = _modules.get(number)
    if module is None:
        raise RuntimeError("the decoder of this graph is gone: keep it for as long as the compiled or exported model")
    return module


@torch.library.custom_op("memhier::topk", mutates_args=())
def topk(hidden: Tensor, number: int, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of the module of this number, float32 ``[..., k]``, and their words, int64."""
    return _called(number).topk(hidden, k)


@topk.register_fake
def _(hidden: Tensor, number: int, k: int) -> tuple[Tensor, Tensor]:
    shape = (*hidden.shape[:-1], k)
    return hidden.new_empty(shape, dtype=torch.float32), hidden.new_empty(shape, dtype=torch.int64)


@torch.library.custom_op("memhier::logits", mutates_args=())
def logits(hidden: Tensor, number: int, words: int) -> Tensor:
    """Return logits ``[..., words]`` of the module of this number, in the dtype of `hidden`."""
    return _called(number).all_logits(hidden).contiguous()  # as the other one says


@logits.register_fake
def _(hidden: Tensor, number: int, words: int) -> Tensor:
    return hidden.new_empty((*hidden.shape[:-1], words))
