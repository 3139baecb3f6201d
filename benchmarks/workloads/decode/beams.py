"""Beam search over a recurrent model, with whatever returns the likeliest words and their log-probabilities."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from memhier.benchmarks.workloads.decode.ptb import Floats, Ints, Lstm

__all__ = ["beam_search"]

Ask: TypeAlias = Callable[[Floats, int], tuple[Any, Ints]]


def beam_search(model: Lstm, first: int, ask: Ask, beams: int = 5, length: int = 20) -> tuple[list[int], float]:
    """Return the likeliest text found after a word, and its log-probability.

    Parameters
    ----------
    ask
        Takes hidden states ``[n, D]`` and k to log-probabilities and words ``[n, k]``.
    """
    dimension = model.embed.shape[1]
    hidden = cell = np.zeros((1, dimension), np.float32)
    texts: list[list[int]] = [[]]
    scores, last = np.zeros(1), np.array([first])
    for _ in range(length):
        hidden, cell = model.step(last, hidden, cell)
        values, words = ask(hidden, beams)
        totals = (scores[:, None] + values).reshape(-1)
        # Ties go to the earlier beam in every way of asking.
        best = np.argsort(-totals, kind="stable")[:beams]
        source = best // beams
        texts = [
            [*texts[beam], int(words.reshape(-1)[at])] for beam, at in zip(source.tolist(), best.tolist(), strict=True)
        ]
        scores, last = totals[best], words.reshape(-1)[best]
        hidden, cell = hidden[source], cell[source]
    return texts[0], float(scores[0])
