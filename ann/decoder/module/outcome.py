"""The change that a model makes to the logits of its output layer, found by comparing both.

Some models scale or cap logits, add a bias or rule words out after the layer. The layer's largest logits are the
model's own only if the change keeps their order, and so are probabilities only if there is no change.
"""

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

__all__ = ["Outcome", "outcome_allows", "outcome_of"]

Outcome: TypeAlias = Literal["same", "scaled", "rising", "other"]

_ALLOWED: dict[Outcome, tuple[str, ...]] = {
    "same": ("largest", "proven", "filled"),
    "scaled": ("largest", "proven"),
    "rising": ("largest",),  # a cap may make logits equal
    "other": (),
}


def outcome_allows(outcome: Outcome, logits: str) -> bool:
    """Say if logits of this kind are still the model's own after a change of this outcome."""
    return logits in _ALLOWED[outcome]


def outcome_of(raw: Tensor, output: Any) -> Outcome:
    """Return how a call of the model changed the layer's logits.

    Parameters
    ----------
    raw
        The layer's result, ``[..., V]``.
    output
        The model's result: logits, an object with them as `logits`, or a tuple that holds them.

    Returns
    -------
    str
        ``"same"``; ``"scaled"`` by one number above zero, in float32; ``"rising"``: changed by one function that keeps
        their order; ``"other"``.
    """
    logits = _logits(output, raw)
    if logits is None:
        return "other"
    if torch.equal(logits, raw.to(logits.dtype)):
        return "same"
    before, after = raw.double().reshape(-1), logits.double().reshape(-1)
    if not torch.isfinite(after).all() or not float(before.square().sum()) > 0:
        return "other"
    scale = float((before * after).sum() / before.square().sum())
    near = torch.allclose(after, scale * before, rtol=1e-6, atol=1e-6 * float(after.abs().max()))
    if near and scale > 0 and raw.dtype == logits.dtype == torch.float32:
        return "scaled"
    rises = after[before.argsort()].diff()
    span = float(after.max() - after.min())
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-6}.get(raw.dtype, 1e-2) * float(after.abs().max())
    return "rising" if span > 100 * tolerance and float(rises.min()) >= -tolerance else "other"


def _logits(output: Any, raw: Tensor) -> Tensor | None:
    found = getattr(output, "logits", None)
    parts = [output if found is None else found, *(output if isinstance(output, tuple) else ())]
    return next((part for part in parts if isinstance(part, Tensor) and part.shape == raw.shape), None)
