"""Draws of words by a core: the request, and the logits that a core asks for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.core.verdicts import Rule
from memhier.ann.decoder.engine.envelope import Doubles, Shape
from memhier.ann.decoder.layer import Floats, Ints

__all__ = ["DrawRequest", "draw_by_core"]


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """A word to draw for each of n hidden states.

    Attributes
    ----------
    rule, temperature
        Truncations of the scores, which are logits over the temperature.
    shape
        The change of logits before their exp, for bounds: the factor has the temperature in it.
    stages
        int64 ``[s, 2]``: words of the head, ascending, and words drawn as evidence.
    seeds
        uint64 ``[n]``: of the numbers that a draw takes.
    words, scores
        int64 and float64 ``[n, c]``: words with other scores than the layer gives them, each once, -1 for none; None.
    finish
        Takes exact logits of the layer to those of the model; None if they are the same.
    rounding
        The most by which it rounds, as a share of a logit.
    """

    rule: Rule
    temperature: float
    shape: Shape
    stages: Ints
    seeds: npt.NDArray[np.uint64]
    words: Ints | None = None
    scores: Doubles | None = None
    finish: Callable[[Floats], npt.NDArray[np.floating]] | None = None
    rounding: float = 0.0


def draw_by_core(
    core: Any, hidden: Floats, request: DrawRequest, exact: Callable[[int, Ints], Floats] | None = None
) -> tuple[int, Ints, npt.NDArray[np.bool_]]:
    """Return the number of the first state that is not finite, -1 for none; a word of each state, or -1; if it stays.

    Parameters
    ----------
    exact
        Returns exact logits of rows for the state of a number, if the core has none.
    """
    drawn, stays = np.empty(len(hidden), np.int64), np.empty(len(hidden), np.uint8)
    exchange, finish = None, request.finish or np.asarray
    if exact is not None or request.finish is not None:
        most = int(request.stages.max())
        rows, logits, scores = np.empty(most, np.int64), np.empty(most, np.float32), np.empty(most)

        def ask(number: int, count: int) -> None:
            found = logits[:count] if exact is None else exact(number, rows[:count])
            scores[:count] = finish(found)

        exchange = rows, logits, scores, ask
    words, changed = (None if each is None else np.ascontiguousarray(each) for each in (request.words, request.scores))
    bad = core.draw(
        hidden=hidden, shape=tuple(request.shape), rule=tuple(request.rule), temperature=request.temperature,
        rounding=request.rounding, stages=request.stages, seeds=request.seeds, out=words,
        scores=changed, exchange=exchange, drawn=drawn, stays=stays,
    )  # fmt: skip
    return bad, drawn, stays.view(np.bool_)
