"""Which words to draw from, and with what weights: top-k and top-p without sorting the vocabulary."""

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from memhier.ann.decoder.index import LogitIndex

__all__ = ["nucleus"]

_FIRST = 256

Ints: TypeAlias = npt.NDArray[np.int64]
Doubles: TypeAlias = npt.NDArray[np.float64]


def nucleus(
    index: "LogitIndex", states: npt.NDArray[np.float32], top_k: int | None, top_p: float | None, temperature: float
) -> tuple[Ints, Doubles]:
    """Return words ``[n, c]`` and weights of draws, zero for words that are out.

    With `top_p` alone probabilities are of all words, by the estimate of log Z, and words are added fourfold until
    every nucleus is whole.
    """
    words = index.shape[0]
    if top_k is not None:
        found = index.topk(states, top_k)
        logits = found.values.astype(np.float64) / temperature
        shares = np.exp(logits - logits[:, :1])
        shares /= shares.sum(1, keepdims=True)
        return found.indices, _cut(shares, top_p)
    assert top_p is not None
    log_z = index.partition(states, temperature=temperature).estimate[:, None]
    count = min(words, _FIRST)
    while True:
        found = index.topk(states, count)
        logits = found.values.astype(np.float64) / temperature
        if count == words:
            # Nothing is left to be estimated. So it ends where a low temperature makes the estimate useless.
            log_z = np.logaddexp.reduce(logits, axis=1)[:, None]
        shares = np.exp(logits - log_z)
        if count == words or bool((shares.sum(1) >= top_p).all()):
            return found.indices, _cut(shares, top_p)
        count = min(words, 4 * count)


def _cut(shares: Doubles, top_p: float | None) -> Doubles:
    """Return shares without what lies beyond the nucleus; the word that completes it stays."""
    if top_p is None:
        return shares
    before = np.cumsum(shares, 1) - shares
    return np.where(before < top_p, shares, 0.0)
