"""Draws of words among the likeliest, by top-k and top-p, without a sort of the vocabulary."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.index import LogitIndex
from memhier.ann.decoder.layer import LOGITS_MOST, Floats, Ints

__all__ = ["draw", "nucleus", "top_words"]

_FIRST = 256  # words that the first scan looks for
_SORTED = (256, 4096)  # words to sort before all are sorted
_SORTED_AT_ONCE = 2048  # words; a vocabulary of no more is sorted whole
_MOST = 16  # a scan looks for at most one word of so many in the vocabulary; the full product finds more
_DOUBT = 4  # a scan must cost so many times less than the full product, since it may find too few words

Doubles: TypeAlias = npt.NDArray[np.float64]
Full: TypeAlias = Callable[[Floats], Floats]


def top_words(index: LogitIndex, states: Floats, top_k: int, temperature: float) -> tuple[Ints, Doubles]:
    """Return the `top_k` words of each state, likeliest first, and their shares among these, float64 ``[n, k]``."""
    found = index.topk(states, top_k)
    logits = found.values.astype(np.float64) / temperature
    shares = np.exp(logits - logits[:, :1])
    return found.indices, shares / shares.sum(1, keepdims=True)


def draw(words: Ints, shares: Doubles, top_p: float | None, uniform: Doubles) -> Ints:
    """Return a word for each state: the one that a uniform number falls on, of the words that together have `top_p`.

    Parameters
    ----------
    words, shares
        ``[n, c]``, likeliest first.
    uniform
        float64 ``[n]`` in [0, 1).
    """
    if not len(words):
        return np.empty(0, np.int64)
    sums = np.cumsum(shares, 1)
    if top_p is None:
        last = np.full(len(words), words.shape[1] - 1)
    else:
        # The word that completes the nucleus stays.
        last = np.maximum((sums - shares < top_p).sum(1) - 1, 0)
    states = np.arange(len(words))
    at = np.minimum((sums <= (uniform * sums[states, last])[:, None]).sum(1), last)
    drawn: Ints = words[states, at]
    return drawn


def nucleus(index: LogitIndex, states: Floats, top_p: float, temperature: float, uniform: Doubles, full: Full) -> Ints:
    """Return words drawn among the likeliest that together have the probability `top_p`, int64 ``[n]``.

    A scan finds the likeliest words and log Z if it clearly costs less than the full product. The full product answers
    all other states, and states whose nucleus has more words than a scan finds. In both ways the uniform numbers decide
    on the words.

    Parameters
    ----------
    full
        Returns all logits ``[n, V]`` of states.
    """
    words = index.shape[0]
    drawn = np.empty(len(states), np.int64)
    open_, count = np.arange(len(states)), min(words, _FIRST)
    while len(open_) and count < words and index.scan_pays(len(open_), count, _DOUBT):
        found, z = index.distribution(states[open_], count, temperature=temperature)
        # A low temperature makes the estimate useless; then no nucleus is whole, or it is the likeliest word.
        shares = np.exp(np.minimum(found.values.astype(np.float64) / temperature - z.estimate[:, None], 0))
        whole = shares.sum(1) >= top_p
        rows = open_[whole]
        drawn[rows] = draw(found.indices[whole], shares[whole], top_p, uniform[rows])
        open_ = open_[~whole]
        # A full product is dear if it reads rows from SSD, and cheap if they stream from DRAM.
        count = 4 * count if index.layer is None and 4 * count * _MOST <= words else words
    step = max(1, LOGITS_MOST // words)
    for start in range(0, len(open_), step):
        rows = open_[start : start + step]
        drawn[rows] = _draw_of_all(full(states[rows]), top_p, temperature, uniform[rows])
    return drawn


def _draw_of_all(logits: Floats, top_p: float, temperature: float, uniform: Doubles) -> Ints:
    """Draw from all logits; sort all logits of a state only if its nucleus has many words."""
    largest = logits.max(1, keepdims=True)
    sums = np.exp((logits - largest) / np.float32(temperature)).sum(1, keepdims=True, dtype=np.float64)
    drawn, words = np.empty(len(logits), np.int64), logits.shape[1]
    open_ = np.arange(len(logits))
    for count in (*(count for count in _SORTED if 4 * count <= words > _SORTED_AT_ONCE), words):
        if not len(open_):
            break
        some = logits if len(open_) == len(logits) else logits[open_]
        order = _largest(some, count)
        found = some[np.arange(len(some))[:, None], order]
        shares = np.exp((found.astype(np.float64) - largest[open_]) / temperature) / sums[open_]
        if count == words:
            drawn[open_] = draw(order, shares, top_p, uniform[open_])
            break
        whole = shares.sum(1) >= top_p
        rows = open_[whole]
        drawn[rows] = draw(order[whole], shares[whole], top_p, uniform[rows])
        open_ = open_[~whole]
    return drawn


def _largest(logits: Floats, count: int) -> Ints:
    """Return the places of the largest logits, largest first."""
    if count == logits.shape[1]:
        return np.argsort(-logits, axis=1)
    places = np.argpartition(logits, -count, axis=1)[:, -count:]
    states = np.arange(len(logits))[:, None]
    return places[states, np.argsort(-logits[states, places], axis=1)]
