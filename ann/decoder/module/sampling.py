"""Draws of words from the softmax of all logits, exact in distribution, without the full product.

A few hundred logits of the highest proven bounds are exact: the head. All other words, the tail, have bounds. A draw
takes the head or the tail by the sum of exp of both, bounds in the place of logits for the tail; a word of the tail
stays with the probability exp(logit - bound), else the draw begins anew. So words come by the softmax exactly.

A truncation is a question about the word drawn: does it stay? (:mod:`memhier.ann.decoder.module.verdicts`) A state that
stays open takes the full product, which answers for the same word.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from memhier.ann.decoder.engine.envelope import AS_IS, DRAWS_MOST, Shape
from memhier.ann.decoder.index import LogitIndex
from memhier.ann.decoder.layer import LOGITS_MOST, Floats, Ints
from memhier.ann.decoder.module.truncation import Truncation, drawn_of, places_of, shares_of
from memhier.ann.decoder.module.verdicts import DECIDED, TRIES, Asked, Bounded, Verdicts

__all__ = ["HEAD_WORDS", "Known", "Layer", "Sampler"]

HEAD_WORDS = 256
# Words of the head and words drawn from the tail, more and more where the ones before leave a question open.
_STAGES = ((HEAD_WORDS, 192), (1024, 1024), (4096, 4096), (DRAWS_MOST, DRAWS_MOST))
_LISTED = {"top_k": (4, 16), "min_p": (1, 4, 16)}  # times so many words of the head, before the full product
_WORDS_AT_ONCE = 1 << 15  # of all states, with some 100 bytes each: more states take turns
_NOTHING, _LEAST = 1e-300, -1e300
_RARE = 8.0  # words with bounds below some together have at most exp of minus this of the tail

Doubles: TypeAlias = npt.NDArray[np.float64]
Bits: TypeAlias = npt.NDArray[np.bool_]


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
        Takes exact logits of the layer to those of the model: a scale, a cap, the rounding of its dtype.
    shape
        The same scale and cap, for bounds.
    rounding
        The most by which `finish` rounds, as a share of a logit.
    """

    index: LogitIndex
    full: Callable[[Floats], Floats]
    finish: Callable[[Floats], npt.NDArray[np.floating]] = np.asarray
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
        if not self._layer.index.draws_pay(max(1, len(states)), limit + _STAGES[0][1]):
            cause = "faster"
        elif steps[:1] in (("top_k",), ("min_p",)):
            cause = f"{steps[0]} beyond the bounds"
            rows = self._listed(states, known, rows, limit, drawn)
        elif steps in DECIDED:
            cause = "undecided"
            rows = self._tried(states, known, rows, drawn, pending)
        else:
            cause = next(name for name in steps if name not in ("top_p", "min_p") or len(steps) == 1)
        self._full_of(states, known, rows, drawn, pending)
        if len(rows):
            self.full_rows[cause] += len(rows)
        return drawn

    def _uniforms(self, *shape: int) -> Doubles:
        numbers: Doubles = torch.rand(shape, dtype=torch.float64, generator=self._generator).numpy()
        return numbers

    def _bounded(self, states: Floats, known: Known, limit: int, uniforms: Doubles) -> Bounded:
        """Look at some states; the head holds the known words, too. Words drawn from the tail come by the uniforms."""
        layer, inverse = self._layer, self._shape.inverse
        found = layer.index.envelope(
            states, limit, uniforms, self._shape, out=known.words if known.words.size else None
        )
        words, scores = found.rows, self._scores(found.logits)
        if known.words.size:
            words = np.concatenate([words, known.words], 1)
            scores = np.concatenate([scores, known.logits / self._rule.temperature], 1)
            scores[words < 0] = -np.inf
        bounds = np.multiply(found.bounds, inverse, dtype=np.float64)
        cut, log_sum = inverse * found.cut, found.log_sum
        if layer.rounding:
            slack = layer.rounding * np.abs(np.where(np.isfinite(cut), cut, 0.0))
            bounds, cut, log_sum = bounds + slack[:, None], cut + slack, log_sum + slack
        best = scores.max(1)
        drawn_scores = self._scores(found.drawn_logits)
        with np.errstate(invalid="ignore", over="ignore"):
            shares = np.exp(scores - np.maximum(best, _LEAST)[:, None])
            total = np.maximum(shares.sum(1), _NOTHING)
            kept = np.exp(np.minimum(drawn_scores - np.maximum(bounds, _LEAST), 0))
            whole = best + np.log(total)
            tail = np.exp(log_sum - whole)
            rare, rare_sum = cut, tail  # true, and as good as any where no mean score is asked for
            if self._rule.typical_p is not None or self._rule.eta_cutoff is not None:
                log_words = np.log(layer.index.shape[0])
                rare = cut - _RARE - log_words + np.clip(log_sum - cut, 0, log_words)
                rare_sum = np.where(np.isneginf(cut), 0.0, np.exp(rare + log_words - whole))
        return Bounded(
            words, scores, best, shares, total, tail, cut, found.drawn, drawn_scores, bounds, kept, rare, rare_sum
        )

    def _scores(self, logits: Floats) -> Doubles:
        changed: Doubles = np.asarray(self._layer.finish(logits), np.float64) / self._rule.temperature
        np.putmask(changed, logits == -np.inf, -np.inf)
        return changed

    def _listed(self, states: Floats, known: Known, rows: Ints, limit: int, drawn: Ints) -> Ints:
        """Draw for states of which all words that the first truncation keeps are found; return the others."""
        rule = self._rule
        for most in sorted({min(limit * times, DRAWS_MOST) for times in _LISTED[rule.steps[0]]}):
            if most < (rule.top_k or 0):
                break
            for some in _parts(rows, most):
                found = self._bounded(states[some], known.of(some), most, np.empty((len(some), 0)))
                # Of equal scores the greater word is the first to stay.
                order = np.lexsort((found.words, found.scores), axis=1)
                words, rising = np.take_along_axis(found.words, order, 1), np.take_along_axis(found.scores, order, 1)
                if rule.top_k is not None:
                    least = rising[:, -min(rule.top_k, rising.shape[1])]
                else:
                    least = found.best + np.log(rule.min_p or 1.0)
                whole = (least > found.cut) | np.isneginf(found.cut)
                uniform = self._uniforms(len(some))
                shares = shares_of(rising[whole] * rule.temperature, rule)
                drawn[some[whole]] = drawn_of(words[whole], shares, uniform[whole])
            rows = rows[drawn[rows] < 0]
        return rows

    def _tried(self, states: Floats, known: Known, rows: Ints, drawn: Ints, pending: Ints) -> Ints:
        """Draw for states until the words are known to stay; return the others, whose words are pending or -1."""
        levels = np.zeros(len(states))
        for limit, draws in _STAGES:
            draws = draws if self._rule.steps else TRIES  # all others are evidence
            for some in _parts(rows, limit + draws):
                evidence, uniforms = len(some) * draws, self._uniforms(len(some) * (draws + 2 * TRIES))
                numbers, tries = uniforms[:evidence].reshape(-1, draws), uniforms[evidence:].reshape(2, -1, TRIES)
                found = self._bounded(states[some], known.of(some), limit, numbers)
                self._decided(found, some, tries, levels, drawn, pending)
            rows = rows[drawn[rows] < 0]
            if not len(rows):
                break
        return rows

    def _decided(self, found: Bounded, rows: Ints, tries: Doubles, levels: Doubles, drawn: Ints, pending: Ints) -> None:
        """Try words of each state until one stays or is open; it is drawn, or pending with its score in `levels`."""
        side, keeps = tries
        uniform = side * (1 + found.tail)[:, None]  # in units of the head
        of_head = uniform < 1
        taken = of_head | (keeps < found.kept[:, :TRIES])
        verdicts, live = Verdicts(found, self._rule), np.arange(len(rows))
        while len(live):
            fresh = live[pending[rows[live]] < 0]
            if len(fresh):
                at = taken[fresh].argmax(1)
                words, levels[rows[fresh]] = _tried_words(found, fresh, at, of_head[fresh, at], uniform[fresh, at])
                pending[rows[fresh]] = np.where(taken[fresh, at], words, -1)
            left = live[pending[rows[live]] >= 0]
            verdict = verdicts(left, Asked(pending[rows[left]], levels[rows[left]]))
            stays, live = left[verdict > 0], left[verdict < 0]
            drawn[rows[stays]] = pending[rows[stays]]
            if not len(live):
                break
            pending[rows[live]] = -1
            # A word of the stage before is no try of this one.
            tried = live[np.isin(live, fresh)]
            taken[tried, taken[tried].argmax(1)] = False

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


def _tried_words(found: Bounded, live: Ints, at: Ints, of_head: Bits, uniform: Doubles) -> tuple[Ints, Doubles]:
    """Return words and scores of one try of each live state."""
    place = places_of(found.shares[live], uniform)
    words = np.where(of_head, found.words[live, place], found.drawn[live, at])
    return words, np.where(of_head, found.scores[live, place], found.drawn_scores[live, at])


def _parts(rows: Ints, words: int) -> list[Ints]:
    """Return states in parts that look at a bounded number of words, each at so many."""
    step = max(1, _WORDS_AT_ONCE // words)
    return [rows[start : start + step] for start in range(0, len(rows), step)]
