"""Verdicts on words drawn: does a truncation keep them? By exact logits of some words and bounds of all others.

A truncation asks for the sign of a sum over all words, of exp of a word's score times a number of the word. The head
gives its part; where the bounds leave the sign open, words drawn from the tail, with exact logits, give evidence for a
mean (:mod:`memhier.ann.decoder.module.evidence`). The word's information less the entropy, which typical and eta
sampling ask for, is the mean score under the softmax less the word's score, so that log Z drops out.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.layer import Ints
from memhier.ann.decoder.module.evidence import is_mean_above
from memhier.ann.decoder.module.truncation import Truncation

__all__ = ["DECIDED", "TRIES", "Asked", "Bounded", "Verdicts"]

DECIDED = ((), ("top_p",), ("top_p", "min_p"), ("epsilon_cutoff",), ("typical_p",), ("eta_cutoff",))
TRIES = 32  # words drawn from the tail: the first are tries of a draw, all others evidence
# Of the evidence for a mean score a third guesses it, a third proves an interval around it, a third decides by that.
_GUESS, _PROOF, _REST = (slice(TRIES + third, None, 3) for third in range(3))
_LIKELY = 7.0  # standard deviations within which a mean is proven
_RANGES = (0.0, 4.0, 20.0)  # and ranges over the size of the sample, as rare words of the tail may be far

_SUMMED = 1e-9  # the rounding of a mean score

Doubles: TypeAlias = npt.NDArray[np.float64]
Bits: TypeAlias = npt.NDArray[np.bool_]
Signs: TypeAlias = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class Bounded:
    """A head of words with exact scores, and a tail: scores are logits over the temperature."""

    words: Ints
    scores: Doubles
    best: Doubles  # the largest score of the head
    shares: Doubles  # exp of score less best
    total: Doubles  # the sum of the shares
    tail: Doubles  # the sum of exp of the tail's bounds, as a share of the head's
    cut: Doubles  # the largest bound of the tail
    drawn: Ints
    drawn_scores: Doubles
    bounds: Doubles  # of the words drawn
    kept: Doubles  # exp of score less bound
    rare: Doubles  # a bound: words of the tail below it count for little
    rare_sum: Doubles  # at least the sum of exp of their bounds, as a share of the head's

    def of(self, rows: Ints) -> "Bounded":
        """Return some states, in ascending order."""
        return (
            self
            if len(rows) == len(self.best)
            else Bounded(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))
        )


@dataclass(frozen=True, slots=True)
class Asked:
    """Words that may stay, one for each of some states, and their scores."""

    words: Ints
    scores: Doubles

    def above(self, words: Ints, scores: Doubles) -> Bits:
        """Say which words are above those asked; of equal scores the greater word, as in transformers.

        Never the word itself, whose score may be rounded in another way.
        """
        level, word = self.scores[:, None], self.words[:, None]
        found: Bits = ((scores > level) & (words != word)) | ((scores == level) & (words > word))
        return found

    def of(self, places: Ints) -> "Asked":
        """Return some of them."""
        return Asked(self.words[places], self.scores[places])


class Verdicts:
    """Verdicts by a truncation, for states that were looked at together."""

    def __init__(self, found: Bounded, rule: Truncation) -> None:
        self._found, self._rule = found, rule
        with np.errstate(invalid="ignore", over="ignore"):  # a tail without end leaves the mean open
            self._mean = _mean_score(found) if "typical_p" in rule.steps else None

    def __call__(self, rows: Ints, asked: Asked) -> Signs:
        """Return of a word of each row: 1 if it stays, -1 if it goes, 0 if that is open."""
        rule, some = self._rule, self._found.of(rows)
        verdict = np.ones(len(rows), np.int8)
        if not len(rows):
            return verdict
        if rule.top_p is not None and "top_p" in rule.steps:
            verdict = _in_nucleus(some, asked, rule.top_p)
        if rule.typical_p is not None and self._mean is not None:
            low, high = (bound[rows] for bound in self._mean)
            verdict = _is_typical(some, asked.scores, (low, high), rule.typical_p)
        if rule.epsilon_cutoff is not None:
            verdict = _above(some, asked.scores, rule.epsilon_cutoff)
        if rule.eta_cutoff is not None:
            # The lower of two limits: a word stays if one of them lets it.
            certain = asked.scores - np.log(rule.eta_cutoff) / 2
            unlikely = _mean_above(some, certain, slice(TRIES, None))
            verdict = np.maximum(_above(some, asked.scores, rule.eta_cutoff), -unlikely)
        if rule.min_p is not None:
            limit = np.log(rule.min_p)
            sure = asked.scores >= np.maximum(some.best, some.cut) + limit
            verdict = np.where(asked.scores < some.best + limit, -1, np.where(sure, verdict, np.minimum(verdict, 0)))
        return verdict.astype(np.int8, copy=False)


def _in_nucleus(found: Bounded, asked: Asked, top_p: float) -> Signs:
    """Say if the words above a word have less than `top_p` together: sums are shares of the head's."""
    above = (found.shares * asked.above(found.words, found.scores)).sum(1) / found.total
    beyond = asked.scores <= found.cut  # words of the tail may be above it
    most = above + np.where(beyond, found.tail * (1 - top_p), 0)
    verdict: Signs = (most < top_p) - (above >= top_p * (1 + found.tail)).astype(np.int8)
    open_ = np.flatnonzero(verdict == 0)
    if len(open_):
        higher = asked.of(open_).above(found.drawn[open_, TRIES:], found.drawn_scores[open_, TRIES:])
        sample = found.kept[open_, TRIES:] * (top_p - higher)
        least = np.where(beyond[open_], top_p - 1, 0.0)
        verdict[open_] = _is_above(sample, (least, top_p), above[open_] - top_p, found.tail[open_])
    return verdict


def _above(found: Bounded, levels: Doubles, least: float) -> Signs:
    """Say if a word has at least the probability `least`, or is the likeliest."""
    share = np.exp(levels - found.best) / found.total / least  # of the head; log Z must not be above it
    first = levels >= np.maximum(found.best, found.cut)
    below = (share < 1) & (levels < found.best)
    verdict = np.where(first | (share >= 1 + found.tail), 1, np.where(below, -1, 0)).astype(np.int8)
    open_ = np.flatnonzero(verdict == 0)
    if len(open_):
        verdict[open_] = -is_mean_above(found.kept[open_, TRIES:], (share[open_] - 1) / found.tail[open_])
    return verdict


def _is_typical(found: Bounded, levels: Doubles, mean: tuple[Doubles, Doubles], typical_p: float) -> Signs:
    """Say if the words whose scores are nearer to the mean score than a word's have less than `typical_p` together."""
    low, high = mean
    union = np.minimum(levels, 2 * low - levels), np.maximum(levels, 2 * high - levels)
    common = np.minimum(levels, 2 * high - levels), np.maximum(levels, 2 * low - levels)
    inside = (low < levels) & (levels < high)
    common = np.where(inside, levels, common[0]), np.where(inside, levels, common[1])
    stays, goes = (_mass_above(found, between, typical_p, _REST) for between in (union, common))
    verdict: Signs = np.where(stays < 0, 1, np.where(goes > 0, -1, 0)).astype(np.int8)
    return verdict


def _mean_score(found: Bounded) -> tuple[Doubles, Doubles]:
    """Return bounds of the mean score under the softmax of all words."""
    kept, tail, best = found.kept[:, _GUESS], found.tail, found.best
    away = kept * _known(found.drawn_scores[:, _GUESS] - best[:, None])
    mass, count = 1 + tail * kept.mean(1), kept.shape[1]
    middle = best + (_head_sum(found, best) + tail * away.mean(1)) / mass
    spread = (away - kept * (middle - best)[:, None]).std(1) / np.sqrt(count)
    span = np.where(tail > 0, 1 + np.abs(middle - found.rare), 0.0) / count
    low, high = np.full(len(middle), -np.inf), np.full(len(middle), np.inf)
    for ranges in _RANGES[::-1]:  # from wide to narrow: the last that is proven stays
        near = tail / mass * (_LIKELY * spread + ranges * span) + _SUMMED
        low = np.where(_mean_above(found, middle - near, _PROOF, 2 * len(_RANGES)) > 0, middle - near, low)
        high = np.where(_mean_above(found, middle + near, _PROOF, 2 * len(_RANGES)) < 0, middle + near, high)
    return low, high


def _mean_above(found: Bounded, levels: Doubles, part: slice, tests: int = 1) -> Signs:
    """Say if the mean score under the softmax of all words lies above a level: 1, below: -1, open: 0.

    A word of the tail counts exp(score) * (score - level). Words of by far the least bounds count by these alone, as
    the others then have a range that some words drawn can tell.
    """
    cut = np.where(np.isneginf(found.cut), found.best, found.cut)
    rare = np.where(np.isneginf(found.cut), found.best, found.rare)
    away = _known(found.drawn_scores[:, part] - levels[:, None])
    sample = np.where(found.bounds[:, part] >= rare[:, None], found.kept[:, part] * away, 0.0)
    span = -np.maximum(1, levels - rare), np.maximum(0, cut - levels)
    unseen = found.rare_sum * (1 + np.abs(levels - rare))
    head = _head_sum(found, levels)
    below, above = (_is_above(sample, span, sign * unseen - head, found.tail, tests) for sign in (-1, 1))
    return np.where(above > 0, 1, np.where(below < 0, -1, 0)).astype(np.int8)


def _mass_above(found: Bounded, between: tuple[Doubles, Doubles], share: float, part: slice) -> Signs:
    """Say if words whose scores lie between two, without these, have together more than a share."""
    low, high = (each[:, None] for each in between)
    head = (found.shares * ((found.scores > low) & (found.scores < high))).sum(1) / found.total - share
    inside = (found.drawn_scores[:, part] > low) & (found.drawn_scores[:, part] < high)
    return _is_above(found.kept[:, part] * (inside - share), (-share, 1 - share), -head, found.tail)


def _head_sum(found: Bounded, levels: Doubles) -> Doubles:
    """Return the mean over the head of score less level."""
    sums: Doubles = (found.shares * _known(found.scores - levels[:, None])).sum(1) / found.total
    return sums


def _known(away: Doubles) -> Doubles:
    """Return differences of scores; zero for words that are out, whose share is zero."""
    return np.where(np.isneginf(away), 0.0, away)


def _is_above(
    sample: Doubles, span: tuple[Doubles | float, Doubles | float], limit: Doubles, tail: Doubles, tests: int = 1
) -> Signs:
    """Say if the tail's share times the mean of numbers within a span lies above a limit: 1, below: -1, open: 0."""
    least = np.asarray(span[0])
    width = np.asarray(span[1] - least)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        shares = np.clip((sample - least[..., None]) / width[..., None], 0, 1)
        return is_mean_above(shares, (limit / tail - least) / width, tests)
