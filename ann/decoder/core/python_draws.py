"""Draws of words from the softmax of all logits, by bounds of them: see ``memhier/native/src/draw/sampler.hpp``."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from memhier.ann.decoder.core.verdicts import Bounded, Doubles, Drawn, Ints, Rule, mean_score, verdict_on

__all__ = ["Draw", "Tail", "Uniforms"]

_TRIES, _TRIES_AT_ONCE = 32, 16
_NOTHING, _LEAST = 1e-300, -1e300
_RARE = 8.0  # words with bounds below some together have at most exp of minus this of the tail
_NONE = Drawn(np.empty(0, np.int64), *np.empty((3, 0)))


class Uniforms:
    """Numbers in [0, 1) by splitmix64."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def __call__(self, count: int) -> Doubles:
        """Return the next numbers."""
        steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = np.array([self._state], np.uint64) + steps
        self._state = (self._state + count * 0x9E3779B97F4A7C15) % 2**64
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        numbers: Doubles = ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return numbers


class Tail:
    """Bounds of words, of which the largest are taken."""

    def __init__(self, bounds: Doubles, inverse: float) -> None:
        self.bounds, self._inverse, self.largest, self.log_sum = bounds, inverse, -np.inf, -np.inf

    def take(self, limit: int) -> Ints:
        """Take so many rows of the largest bounds out; return them, ascending."""
        order = np.argsort(-self.bounds, kind="stable")[:limit]
        chosen = np.sort(order[np.isfinite(self.bounds[order])])
        self.bounds[chosen] = -np.inf
        self.largest = self.log_sum = float(self.bounds.max())
        if self.largest > -np.inf:
            self._sums = np.cumsum(np.exp(self._inverse * (self.bounds - self.largest)))
            self.log_sum = self._inverse * self.largest + float(np.log(self._sums[-1]))
        return chosen

    def draw(self, uniforms: Doubles) -> Ints:
        """Return the rows that numbers in [0, 1) fall on."""
        rows: Ints = np.searchsorted(self._sums, uniforms * self._sums[-1], side="right").astype(np.int64)
        return rows


@dataclass(slots=True)
class Draw:
    """A draw of one word for a state.

    Attributes
    ----------
    tail
        The bounds of all words but those that were changed.
    changed
        Words and their scores.
    logits
        Returns exact logits of rows.
    """

    tail: Tail
    changed: tuple[Ints, Doubles]
    logits: Callable[[Ints], Doubles]
    rule: Rule
    inverse: float
    temperature: float
    rounding: float
    uniforms: Uniforms
    slack: float = 0.0
    tries: list[tuple[int, float, float]] = field(default_factory=list)

    def __call__(self, stages: Ints) -> tuple[int, bool]:
        """Return a word, and whether it stays: if not, that is open, and -1 means no word."""
        (words, scores), taken, word, score = self.changed, 0, -1, 0.0
        for limit, count in stages.tolist():
            rows, taken = self.tail.take(limit - taken), limit
            words = np.concatenate([words, rows])
            scores = np.concatenate([scores, self.logits(rows) / self.temperature])
            found = self._bounded(words, scores)
            needs_mean, asked = bool(self.rule.typical_p or self.rule.eta_cutoff), False
            for _ in range(_TRIES):
                if needs_mean and not asked:
                    asked = True
                    self._weigh(found, count)
                if word < 0:
                    word, score = self._attempt(found)
                    if word < 0:
                        continue
                verdict = verdict_on(found, self.rule, word, score)
                if verdict == 0 and not asked and found.tail > 0:
                    asked = True
                    self._weigh(found, count)
                    verdict = verdict_on(found, self.rule, word, score)
                if verdict > 0:
                    return word, True
                if verdict == 0:
                    break
                word = -1
        return word, False

    def _bounded(self, words: Ints, scores: Doubles) -> Bounded:
        tail, self.tries = self.tail, []
        cut = self.inverse * tail.largest
        self.slack = self.rounding * abs(cut) if cut > -np.inf else 0.0
        cut, log_sum, best = cut + self.slack, tail.log_sum + self.slack, float(scores.max())
        floor = self.rule.floor(best)
        shares = np.where(scores < floor, 0.0, np.exp(scores - max(best, _LEAST)))
        total = max(float(shares.sum()), _NOTHING)
        whole, empty = best + float(np.log(total)), tail.largest == -np.inf or cut < floor
        found = Bounded(words, scores, best, shares, total, 0.0, cut, cut, 0.0, _NONE)
        if not empty:
            found.tail = float(np.exp(log_sum - whole))
            count = float(np.log(len(tail.bounds)))
            found.rare = cut - _RARE - count + float(np.clip(log_sum - cut, 0, count))
            found.rare_sum = float(np.exp(found.rare + count - whole))
        return found

    def _weigh(self, found: Bounded, count: int) -> None:
        """Draw evidence from the tail, and bound the mean score if it is asked for."""
        if found.tail > 0:
            found.evidence = self._drawn(self.tail.draw(self.uniforms(count)))
        if self.rule.typical_p:
            found.mean = mean_score(found)

    def _attempt(self, found: Bounded) -> tuple[int, float]:
        """Draw a word from head or tail; -1 where that of the tail does not stay."""
        side = self.uniforms(1)[0] * (1 + found.tail)  # in units of the head
        if side < 1:
            sums = np.cumsum(found.shares)
            # Rounding may lift a number up to the total.
            place = min(int((sums <= side * sums[-1]).sum()), int((sums < sums[-1]).sum()))
            return int(found.words[place]), float(found.scores[place])
        if not self.tries:
            words, scores, _, kept = self._drawn(self.tail.draw(self.uniforms(_TRIES_AT_ONCE)))
            self.tries = list(zip(words.tolist(), scores.tolist(), kept.tolist(), strict=True))
        word, score, stays = self.tries.pop()
        return (word, score) if self.uniforms(1)[0] < stays else (-1, 0.0)

    def _drawn(self, rows: Ints) -> Drawn:
        scores, bounds = self.logits(rows) / self.temperature, self.inverse * self.tail.bounds[rows] + self.slack
        return Drawn(rows, scores, bounds, np.exp(np.minimum(scores - bounds, 0)))
