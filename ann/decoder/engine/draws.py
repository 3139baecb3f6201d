"""Draws of words by a core: the request, and the logits that a core asks for."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.core.verdicts import Rule
from memhier.ann.decoder.engine.envelope import Doubles, Shape
from memhier.ann.decoder.layer import Floats, Ints

__all__ = ["DrawRequest", "draw_by_core", "draw_in_rounds"]


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

    def of(self, states: Ints) -> "DrawRequest":
        """Return the request for some of the states."""
        some = replace(self, seeds=self.seeds[states])
        if self.words is None or self.scores is None:
            return some
        return replace(some, words=self.words[states], scores=self.scores[states])


def draw_by_core(
    core: Any, hidden: Floats, request: DrawRequest, exact: Callable[[int, Ints], Floats | None] | None = None
) -> tuple[int, Ints, npt.NDArray[np.bool_]]:
    """Return the number of the first state that is not finite, -1 for none; a word of each state, or -1; if it stays.

    Parameters
    ----------
    exact
        Returns exact logits of rows for the state of a number, if the core has none; None ends the state's draw, which
        stays open.
    """
    drawn, stays = np.empty(len(hidden), np.int64), np.empty(len(hidden), np.uint8)
    exchange, finish = None, request.finish or np.asarray
    if exact is not None or request.finish is not None:
        most = int(request.stages.max())
        rows, logits, scores = np.empty(most, np.int64), np.empty(most, np.float32), np.empty(most)

        def ask(number: int, count: int) -> bool:
            found = logits[:count] if exact is None else exact(number, rows[:count])
            if found is not None:
                scores[:count] = finish(found)
            return found is not None

        exchange = rows, logits, scores, ask
    words, changed = (None if each is None else np.ascontiguousarray(each) for each in (request.words, request.scores))
    bad = core.draw(
        hidden=hidden, shape=tuple(request.shape), rule=tuple(request.rule), temperature=request.temperature,
        rounding=request.rounding, stages=request.stages, seeds=request.seeds, out=words,
        scores=changed, exchange=exchange, drawn=drawn, stays=stays,
    )  # fmt: skip
    return bad, drawn, stays.view(np.bool_)


def draw_in_rounds(
    core: Any, hidden: Floats, request: DrawRequest, logits_of: Callable[[Floats, Ints], Floats]
) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return a word of each state, or -1, and if it stays, where reads of exact logits cost more than bounds.

    A round begins the draws of states again, and each goes on up to the first logits that were not read. These are read
    for all states at once. The last state left reads as it goes on.

    Parameters
    ----------
    logits_of
        Returns exact logits of rows ``[n, c]`` for states ``[n, D]``; -1 for none.
    """
    words, stays = np.empty(len(hidden), np.int64), np.empty(len(hidden), np.bool_)
    read: list[list[Floats]] = [[] for _ in hidden]
    left = np.arange(len(hidden))
    while True:
        known = _Known([iter(read[number]) for number in left])
        if len(left) == 1:
            known.read = partial(logits_of, hidden[left])
        _, words[left], stays[left] = draw_by_core(core, hidden[left], request.of(left), known)
        left = left[list(known.unread)]
        if not len(left):
            return words, stays
        rows = np.full((len(left), max(map(len, known.unread.values()))), -1)
        for own, unread in zip(rows, known.unread.values(), strict=True):
            own[: len(unread)] = unread
        for number, own, logits in zip(left, rows, logits_of(hidden[left], rows), strict=True):
            read[number].append(logits[own >= 0])


class _Known:
    """Logits that were read for each state, in the order of its requests; notes the rows of those that were not."""

    read: Callable[[Ints], Floats] | None = None

    def __init__(self, answers: list[Iterator[Floats]]) -> None:
        self._answers = answers
        self.unread: dict[int, Ints] = {}

    def __call__(self, number: int, rows: Ints) -> Floats | None:
        found = next(self._answers[number], None)
        if found is None and self.read is not None:
            logits: Floats = self.read(rows[None])[0]
            return logits
        if found is None:
            self.unread[number] = rows.copy()
        return found
