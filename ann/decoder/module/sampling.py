"""Draws of words from the softmax of all logits, exact in distribution, without the full product.

A core draws a word from bounds of all logits and says if a truncation keeps it (:meth:`LogitIndex.draw`). A state that
stays open takes the full product, which answers for the same word. Where the first truncation leaves few words, they
are found by their bounds instead, and drawn from as from all.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from memhier.ann.decoder.core.verdicts import Rule
from memhier.ann.decoder.engine.draws import DrawRequest
from memhier.ann.decoder.engine.envelope import AS_IS, DRAWS_MOST, Shape
from memhier.ann.decoder.index import LogitIndex
from memhier.ann.decoder.layer import LOGITS_MOST, Floats, Ints, check_finite
from memhier.ann.decoder.module.truncation import Truncation, drawn_of, shares_of

__all__ = ["HEAD_WORDS", "Known", "Layer", "Sampler"]

HEAD_WORDS = 256
# Words of a draw's head and words drawn from its tail, more and more where the ones before leave a question open.
_STAGES = np.array([[64, 192], [256, 512], [512, 1024], [1024, 2048], [4096, 4096], [DRAWS_MOST, DRAWS_MOST // 2]])
_STORED_STAGES = _STAGES[[1, 3, 5]]  # of rows on SSD: fewer submissions
_DECIDED = ((), ("top_p",), ("top_p", "min_p"), ("min_p",), ("epsilon_cutoff",), ("typical_p",), ("eta_cutoff",))
_LISTED = {"top_k": (4, 16), "min_p": (1, 4, 16)}  # times so many words of the head, before the full product
_WORDS_AT_ONCE = 1 << 15  # of all states, with some 100 bytes each: more states take turns

Doubles: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Layer:
    """Access to the logits that words are drawn from.

    Attributes
    ----------
    index
        Of the output layer.
    full
        Returns all logits ``[n, V]`` of states, as `finish` leaves them.
    finish
        Takes exact logits of the layer to those of the model: a scale, a cap, the rounding of its dtype; None if they
        are the same.
    shape
        The same scale and cap, for bounds.
    rounding
        The most by which `finish` rounds, as a share of a logit.
    """

    index: LogitIndex
    full: Callable[[Floats], Floats]
    finish: Callable[[Floats], npt.NDArray[np.floating]] | None = None
    shape: Shape = AS_IS
    rounding: float = 0.0


@dataclass(frozen=True, slots=True)
class Known:
    """Words whose logits were computed, and changed since.

    Attributes
    ----------
    words
        int64 ``[n, c]``, each once; -1 for none.
    logits
        float64 ``[n, c]``: minus infinity for words that are ruled out.
    """

    words: Ints
    logits: Doubles

    def of(self, rows: Ints) -> "Known":
        """Return those of some states."""
        return Known(self.words[rows], self.logits[rows]) if self.words.size else self


class Sampler:
    """Draws a word for each of n states, by a truncation.

    Parameters
    ----------
    generator
        The source of randomness; torch's own if None.

    Attributes
    ----------
    full_rows
        Counts of states that took the full product, by cause.
    """

    def __init__(self, layer: Layer, rule: Truncation, generator: torch.Generator | None = None) -> None:
        self._layer, self._rule, self._generator = layer, rule, generator
        inverse = layer.shape.inverse / rule.temperature
        self._shape = Shape(layer.shape.cap, inverse)
        self.full_rows: Counter[str] = Counter()

    def __call__(self, states: Floats, known: Known | None = None) -> Ints:
        """Return the words, int64 ``[n]``.

        Parameters
        ----------
        states
            float32 ``[n, D]``.
        known
            Words that have other logits than the layer gives them.
        """
        drawn = np.full(len(states), -1, np.int64)
        rows, steps = np.arange(len(states)), self._rule.steps
        limit = max(HEAD_WORDS, 2 * (self._rule.top_k or 0))
        known = known or Known(np.empty((len(states), 0), np.int64), np.empty((len(states), 0)))
        pending = np.full(len(states), -1, np.int64)
        if not self._layer.index.draws_pay(max(1, len(states)), limit + int(_STAGES[0, 1])):
            cause = "faster"
        elif steps in _DECIDED:
            cause = "undecided"
            rows = self._decided(states, known, drawn, pending)
        elif steps[:1] in (("top_k",), ("min_p",)):
            cause = f"{steps[0]} beyond the bounds"
            rows = self._listed(states, known, rows, limit, drawn)
        else:
            cause = next(name for name in steps if name not in ("top_p", "min_p") or len(steps) == 1)
        self._full_of(states, known, rows, drawn, pending)
        if len(rows):
            self.full_rows[cause] += len(rows)
        return drawn

    def _uniforms(self, *shape: int) -> Doubles:
        numbers: Doubles = torch.rand(shape, dtype=torch.float64, generator=self._generator).numpy()
        return numbers

    def _bounded(self, states: Floats, known: Known, limit: int) -> tuple[Ints, Doubles, Doubles]:
        """Return words of the highest bounds, and those known, with their scores; and the highest bound left."""
        layer, shape = self._layer, self._shape
        found = layer.index.envelope(states, limit, shape, out=known.words if known.words.size else None)
        finished = found.logits if layer.finish is None else layer.finish(found.logits)
        scores = np.asarray(finished, np.float64) / self._rule.temperature
        words = found.rows
        np.putmask(scores, words < 0, -np.inf)
        if known.words.size:
            words = np.concatenate([words, known.words], 1)
            scores = np.concatenate([scores, known.logits / self._rule.temperature], 1)
            scores[words < 0] = -np.inf
        cut = shape.inverse * found.cut
        return words, scores, cut + layer.rounding * np.abs(np.where(np.isfinite(cut), cut, 0.0))

    def _listed(self, states: Floats, known: Known, rows: Ints, limit: int, drawn: Ints) -> Ints:
        """Draw for states of which all words that the first truncation keeps are found; return the others."""
        rule = self._rule
        for most in sorted({min(limit * times, DRAWS_MOST) for times in _LISTED[rule.steps[0]]}):
            if most < (rule.top_k or 0):
                break
            for some in _parts(rows, most):
                words, scores, cut = self._bounded(states[some], known.of(some), most)
                if rule.top_k is not None:
                    place = scores.shape[1] - min(rule.top_k, scores.shape[1])
                    least = np.partition(scores, place, axis=1)[:, place]
                else:
                    least = scores.max(1) + np.log(rule.min_p or 1.0)
                whole = (least > cut) | np.isneginf(cut)
                words, scores = _likeliest(words[whole], scores[whole], least[whole])
                uniform = self._uniforms(len(some))
                drawn[some[whole]] = drawn_of(words, shares_of(scores * rule.temperature, rule), uniform[whole])
            rows = rows[drawn[rows] < 0]
        return rows

    def _decided(self, states: Floats, known: Known, drawn: Ints, pending: Ints) -> Ints:
        """Draw for all states; return those that stay open, whose words are pending or -1."""
        rule, layer = self._rule, self._layer
        check_finite(states)  # before the generator moves on
        request = DrawRequest(
            Rule(**{name: getattr(rule, name) for name in rule.steps}),
            rule.temperature, self._shape, _STAGES if layer.index.layer is not None else _STORED_STAGES,
            torch.randint(-(2**63), 2**63 - 1, (len(states),), generator=self._generator).numpy().view(np.uint64),
            finish=layer.finish, rounding=layer.rounding,
        )  # fmt: skip
        if known.words.size:
            request = replace(request, words=known.words, scores=known.logits / rule.temperature)
        words, stays = layer.index.draw(states, request)
        drawn[stays] = words[stays]
        rows = np.flatnonzero(~stays)
        pending[rows] = words[rows]
        return rows

    def _full_of(self, states: Floats, known: Known, rows: Ints, drawn: Ints, pending: Ints) -> None:
        """Draw for the rows from all logits; a pending word is the draw if it stays."""
        words = self._layer.index.shape[0]
        step = max(1, LOGITS_MOST // words)
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            logits = np.array(self._layer.full(states[some]), np.float64)
            state, column = np.nonzero(known.words[some] >= 0)
            logits[state, known.words[some][state, column]] = known.logits[some][state, column]
            shares = shares_of(logits, self._rule)
            fresh = drawn_of(np.broadcast_to(np.arange(words), shares.shape), shares, self._uniforms(len(some)))
            waits = pending[some]
            stays = (waits >= 0) & (shares[np.arange(len(some)), waits] > 0)
            drawn[some] = np.where(stays, waits, fresh)


def _likeliest(words: Ints, scores: Doubles, least: Doubles) -> tuple[Ints, Doubles]:
    """Return all words from the least score on, and as many of each state, by rising scores.

    Of equal scores the greater word comes last, as it is the first to stay.
    """
    near = least - 1e-9 * np.maximum(1, np.abs(least))  # rounding may lift a score up to the least
    count = int((scores >= near[:, None]).sum(1).max(initial=1))
    places = np.argpartition(scores, -count, axis=1)[:, -count:]
    words, scores = np.take_along_axis(words, places, 1), np.take_along_axis(scores, places, 1)
    order = np.lexsort((words, scores), axis=1)
    return np.take_along_axis(words, order, 1), np.take_along_axis(scores, order, 1)


def _parts(rows: Ints, words: int) -> list[Ints]:
    """Return states in parts that look at a bounded number of words, each at so many."""
    step = max(1, _WORDS_AT_ONCE // words)
    return [rows[start : start + step] for start in range(0, len(rows), step)]
