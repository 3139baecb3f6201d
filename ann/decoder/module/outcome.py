"""The change that a model makes to the logits of its output layer, found by comparing both.

Some models scale or cap logits, add a bias or rule words out after the layer. The layer's largest logits are the
model's own only if the change keeps their order, and so are probabilities only if there is no change.
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from memhier.ann.decoder.engine.envelope import Shape

__all__ = ["Change", "Outcome", "change_of", "outcome_allows", "outcome_of"]

Outcome: TypeAlias = Literal["same", "scaled", "rising", "other"]

_ALLOWED: dict[Outcome, tuple[str, ...]] = {
    "same": ("largest", "proven", "filled"),
    "scaled": ("largest", "proven"),
    "rising": ("largest",),  # a cap may make logits equal
    "other": (),
}


@dataclass(frozen=True, slots=True)
class Change:
    """A scale or a cap of logits, computed as transformers' models compute it.

    Attributes
    ----------
    factor, divisor
        Of a scale, as Cohere and Granite have it.
    cap
        As Gemma 2 has it; none at zero.
    """

    factor: float = 1.0
    divisor: float = 1.0
    cap: float = 0.0

    def __call__(self, logits: Tensor) -> Tensor:
        """Return changed logits, in their dtype."""
        if self.cap > 0:
            return torch.tanh(logits / self.cap) * self.cap
        if self.factor != 1:
            return logits * self.factor
        return logits / self.divisor if self.divisor != 1 else logits

    @property
    def shape(self) -> Shape:
        """The same, for bounds."""
        return Shape(self.cap, self.factor / self.divisor)


def change_of(config: Any, raw: Tensor, output: Any) -> Change | None:
    """Return the change that a call of the model made to the layer's logits, to the last bit; None for another one.

    Parameters
    ----------
    config
        The model's configuration, in which its scale or cap is found; None for a model without one.
    raw, output
        As in :func:`outcome_of`.
    """
    logits = _logits(output, raw)
    if logits is None:
        return None
    names = (("factor", "logit_scale"), ("divisor", "logits_scaling"), ("cap", "final_logit_softcapping"))
    numbers = ((part, getattr(config, name, None)) for part, name in names)
    changes = [Change(**{part: float(number)}) for part, number in numbers if isinstance(number, int | float)]
    for change in (Change(), *changes):
        usable = change.factor > 0 and change.divisor > 0 and change.cap >= 0
        if usable and torch.equal(change(raw).to(logits.dtype), logits):
            return change
    return None


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
