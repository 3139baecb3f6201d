"""The choice of words that a sampler draws among: temperature, then truncations in the order of transformers."""

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.layer import Ints

__all__ = ["Truncation", "drawn_of", "places_of", "shares_of"]

_COLDEST = 1e-30  # a temperature whose inverse single precision holds

Doubles: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Truncation:
    """A temperature, and truncations, each of the words that the one before has left; None for none.

    Attributes
    ----------
    temperature
        Divides logits.
    top_k
        Keeps so many of the likeliest words.
    top_p
        Keeps the likeliest words that together have this probability, the word that completes it among them; of equal
        words at the end, the last in number.
    min_p
        Keeps words of at least this share of the likeliest word's probability.
    typical_p
        Keeps the words whose information is nearest to the entropy and that together have this probability.
    epsilon_cutoff
        Keeps words of at least this probability, and the likeliest.
    eta_cutoff
        Keeps words of at least the smaller of this and its root times exp of minus the entropy, and the likeliest.
    steps
        The names of the truncations that are set, in their order.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    steps: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not _COLDEST <= self.temperature < np.inf:
            raise ValueError(
                f"temperature={self.temperature!r}: expected above 0, at least {_COLDEST}, and finite; for the "
                "likeliest word, topk(hidden, 1)"
            )
        for name in ("top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name}={value!r}: expected above 0, at most 1")
        object.__setattr__(self, "steps", tuple(name for name in _STEPS if self._cuts(name)))

    def _cuts(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and not (name in ("top_p", "typical_p") and value == 1)


def shares_of(logits: npt.NDArray[np.floating], rule: Truncation) -> Doubles:
    """Return the probabilities of words after a truncation, float64 ``[n, c]``; zero for words it takes out.

    Parameters
    ----------
    logits
        ``[n, c]``: of all words, or of words that are all those which the first truncation keeps. Of equal ones the
        last is the first to stay.
    """
    scores = logits.astype(np.float64) / rule.temperature
    for name in rule.steps:
        scores[_STEPS[name](scores, getattr(rule, name))] = -np.inf
    return _softmax(scores)


def drawn_of(words: Ints, shares: Doubles, uniform: Doubles) -> Ints:
    """Return the word of each state that a uniform number in [0, 1) falls on, int64 ``[n]``.

    Parameters
    ----------
    words, shares
        ``[n, c]``; shares need not add up to 1.
    """
    drawn: Ints = words[np.arange(len(words)), places_of(shares, uniform)]
    return drawn


def places_of(shares: Doubles, uniform: Doubles) -> Ints:
    """Return the column of each state that a uniform number in [0, 1) falls on, int64 ``[n]``; see :func:`drawn_of`."""
    sums = np.cumsum(shares, 1)
    total = sums[:, -1:]
    # Rounding may lift a number up to the total.
    places: Ints = np.minimum((sums <= uniform[:, None] * total).sum(1), (sums < total).sum(1))
    return places


def _softmax(scores: Doubles) -> Doubles:
    shares: Doubles = np.exp(scores - scores.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    return shares


def _entropy(shares: Doubles) -> Doubles:
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    entropy: Doubles = -(shares * logs).sum(1, keepdims=True)
    return entropy


def _beyond_top_k(scores: Doubles, top_k: int) -> npt.NDArray[np.bool_]:
    words = scores.shape[1]
    least = np.partition(scores, words - min(top_k, words), axis=1)[:, words - min(top_k, words), None]
    found: npt.NDArray[np.bool_] = scores < least
    return found


def _beyond_top_p(scores: Doubles, top_p: float) -> npt.NDArray[np.bool_]:
    shares = _softmax(scores)
    falling = np.sort(shares, axis=1)[:, ::-1]
    kept = (np.cumsum(falling, 1) - falling < top_p).sum(1, keepdims=True)
    least = np.take_along_axis(falling, kept - 1, 1)
    beyond: npt.NDArray[np.bool_] = shares < least
    equal = shares == least
    more = (~beyond).sum(1, keepdims=True) - kept  # equal words at the end
    if more.any():
        beyond |= equal & (np.cumsum(equal, 1) <= more)
    return beyond


def _beyond_min_p(scores: Doubles, min_p: float) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = scores < scores.max(1, keepdims=True) + np.log(min_p)
    return found


def _beyond_typical_p(scores: Doubles, typical_p: float) -> npt.NDArray[np.bool_]:
    shares = _softmax(scores)
    with np.errstate(divide="ignore"):
        away = np.abs(-np.log(shares) - _entropy(shares))
    order = np.argsort(away, axis=1)
    sums = np.cumsum(np.take_along_axis(shares, order, 1), 1)
    last = np.minimum((sums < typical_p).sum(1, keepdims=True), scores.shape[1] - 1)
    found: npt.NDArray[np.bool_] = away > np.take_along_axis(away, np.take_along_axis(order, last, 1), 1)
    return found


def _beyond_epsilon(scores: Doubles, epsilon: float | Doubles) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = (_softmax(scores) < epsilon) & (scores < scores.max(1, keepdims=True))
    return found


def _beyond_eta(scores: Doubles, epsilon: float) -> npt.NDArray[np.bool_]:
    entropy = _entropy(_softmax(scores))
    return _beyond_epsilon(scores, np.minimum(epsilon, np.sqrt(epsilon) * np.exp(-entropy)))


_STEPS = {
    "top_k": _beyond_top_k,
    "top_p": _beyond_top_p,
    "min_p": _beyond_min_p,
    "typical_p": _beyond_typical_p,
    "epsilon_cutoff": _beyond_epsilon,
    "eta_cutoff": _beyond_eta,
}
