"""Verdicts on a word drawn: does a truncation keep it? By exact scores of some words and bounds of all others.

See ``memhier/native/src/draw/verdicts.hpp``, which does the same.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.core.evidence import is_mean_above

__all__ = ["Bounded", "Drawn", "Rule", "mean_score", "verdict_on"]

# Of the evidence for a mean score a third guesses it, a third proves an interval around it, a third decides by that.
_ALL, _GUESS, _PROOF, _REST = slice(None), slice(0, None, 3), slice(1, None, 3), slice(2, None, 3)
_LIKELY = 7.0  # standard deviations within which a mean is proven
_RANGES = (20.0, 4.0, 0.0)  # and ranges over the size of the sample, as rare words of the tail may be far: from wide
_SUMMED = 1e-9  # the rounding of a mean score

Doubles: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]


class Rule(NamedTuple):
    """Truncations, each as a :class:`Truncation` says; zero for none."""

    top_p: float = 0.0
    min_p: float = 0.0
    typical_p: float = 0.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0

    def floor(self, best: float) -> float:
        """Return the score below which words count for nothing, where the largest so far is `best`.

        For a nucleus they count.
        """
        return best + float(np.log(self.min_p)) if self.min_p and not self.top_p else -np.inf


class Drawn(NamedTuple):
    """Words drawn from a tail, each independent of all: with scores, bounds, and exp of score less bound."""

    words: Ints
    scores: Doubles
    bounds: Doubles
    kept: Doubles

    def part(self, places: slice) -> "Drawn":
        """Return some of them."""
        return Drawn(self.words[places], self.scores[places], self.bounds[places], self.kept[places])


@dataclass(slots=True)
class Bounded:
    """A head of words with exact scores, and a tail: scores are logits over the temperature."""

    words: Ints
    scores: Doubles
    best: float  # the largest score of the head
    shares: Doubles  # exp of score less best
    total: float  # the sum of the shares
    tail: float  # the sum of exp of the tail's bounds, as a share of the head's
    cut: float  # the largest bound of the tail
    rare: float  # a bound: words of the tail below it count for little
    rare_sum: float  # at least the sum of exp of their bounds, as a share of the head's
    evidence: Drawn
    mean: tuple[float, float] = (-np.inf, np.inf)


def verdict_on(found: Bounded, rule: Rule, word: int, score: float) -> int:
    """Return 1 if a word stays, -1 if it goes, 0 if that is open."""
    verdict = 1
    if rule.top_p:
        verdict = _in_nucleus(found, word, score, rule.top_p)
    if rule.typical_p:
        verdict = _is_typical(found, word, score, rule.typical_p)
    if rule.epsilon_cutoff:
        verdict = _is_likely(found, score, rule.epsilon_cutoff)
    if rule.eta_cutoff:
        # The lower of two limits: a word stays if one of them lets it.
        unlikely = _mean_above(found, score - np.log(rule.eta_cutoff) / 2, _ALL)
        verdict = max(_is_likely(found, score, rule.eta_cutoff), -unlikely)
    if rule.min_p:
        limit = np.log(rule.min_p)
        if score < found.best + limit:
            return -1
        if score < max(found.best, found.cut) + limit:
            return min(verdict, 0)
    return verdict


def mean_score(found: Bounded) -> tuple[float, float]:
    """Return bounds of the mean score under the softmax of all words."""
    kept, tail, best = found.evidence.kept[_GUESS], found.tail, found.best
    count = max(1, len(kept))
    away = kept * _known(found.evidence.scores[_GUESS] - best)
    mass = 1 + tail * (kept.sum() / count)
    shift = (_head_sum(found, best) + tail * (away.sum() / count)) / mass
    middle = best + shift
    spread = (away - kept * shift).std() / np.sqrt(count) if len(kept) else 0.0
    span = (1 + abs(middle - found.rare)) / count if tail > 0 else 0.0
    low, high = -np.inf, np.inf
    for ranges in _RANGES:  # the last that is proven stays
        near = tail / mass * (_LIKELY * spread + ranges * span) + _SUMMED
        low = middle - near if _mean_above(found, middle - near, _PROOF, 2 * len(_RANGES)) > 0 else low
        high = middle + near if _mean_above(found, middle + near, _PROOF, 2 * len(_RANGES)) < 0 else high
    return float(low), float(high)


def _above(words: Ints, scores: Doubles, word: int, score: float) -> npt.NDArray[np.bool_]:
    """Say which words are above one; of equal scores the greater word, as in transformers.

    Never the word itself, whose score may be rounded in another way.
    """
    found: npt.NDArray[np.bool_] = ((scores > score) & (words != word)) | ((scores == score) & (words > word))
    return found


def _in_nucleus(found: Bounded, word: int, score: float, top_p: float) -> int:
    """Say if the words above a word have less than `top_p` together: sums are shares of the head's."""
    above = float(found.shares[_above(found.words, found.scores, word, score)].sum()) / found.total
    beyond = score <= found.cut  # words of the tail may be above it
    if above >= top_p * (1 + found.tail):
        return -1
    if above + (found.tail * (1 - top_p) if beyond else 0) < top_p:
        return 1
    words, scores, _, kept = found.evidence
    sample = kept * (top_p - _above(words, scores, word, score))
    return _sign_of(sample, (top_p - 1 if beyond else 0.0, top_p), above - top_p, found.tail)


def _is_likely(found: Bounded, score: float, least: float) -> int:
    """Say if a word has at least the probability `least`, or is the likeliest."""
    share = float(np.exp(score - found.best)) / found.total / least  # of the head; log Z must not be above it
    if score >= max(found.best, found.cut) or share >= 1 + found.tail:
        return 1
    if share < 1 and score < found.best:
        return -1
    return -_sign_of(found.evidence.kept, (0.0, 1.0), share - 1, found.tail)


def _is_typical(found: Bounded, word: int, score: float, typical_p: float) -> int:
    """Say if the words whose scores are nearer to the mean score than a word's have less than `typical_p` together."""
    low, high = found.mean
    farthest = min(score, 2 * low - score), max(score, 2 * high - score)
    if _mass_above(found, word, score, farthest, typical_p) < 0:
        return 1
    if low < score < high:
        return 0
    common = min(score, 2 * high - score), max(score, 2 * low - score)
    return -1 if _mass_above(found, word, score, common, typical_p) > 0 else 0


def _mean_above(found: Bounded, level: float, part: slice, tests: int = 1) -> int:
    """Say if the mean score under the softmax of all words lies above a level: 1, below: -1, open: 0.

    A word of the tail counts exp(score) * (score - level). Words of by far the least bounds count by these alone, as
    the others then have a range that some words drawn can tell.
    """
    whole = found.cut == -np.inf
    cut, rare = (found.best, found.best) if whole else (found.cut, found.rare)
    _, scores, bounds, kept = found.evidence.part(part)
    sample = np.where(bounds >= rare, kept * _known(scores - level), 0.0)
    span = -max(1.0, level - rare), max(0.0, cut - level)
    unseen, head = found.rare_sum * (1 + abs(level - rare)), _head_sum(found, level)
    if _sign_of(sample, span, unseen - head, found.tail, tests) > 0:
        return 1
    return -1 if _sign_of(sample, span, -unseen - head, found.tail, tests) < 0 else 0


def _mass_above(found: Bounded, word: int, score: float, between: tuple[float, float], share: float) -> int:
    """Say if words whose scores lie between two, without these, have together more than a share.

    Neither the word nor its equals, which are not nearer than it.
    """

    def inside(words: Ints, scores: Doubles) -> npt.NDArray[np.bool_]:
        within = (scores > between[0]) & (scores < between[1])
        nearer: npt.NDArray[np.bool_] = within & (scores != score) & (words != word)
        return nearer

    head = float(found.shares[inside(found.words, found.scores)].sum()) / found.total - share
    words, scores, _, kept = found.evidence.part(_REST)
    return _sign_of(kept * (inside(words, scores) - share), (-share, 1 - share), -head, found.tail)


def _head_sum(found: Bounded, level: float) -> float:
    """Return the mean over the head of score less level."""
    return float((found.shares * _known(found.scores - level)).sum()) / found.total


def _known(away: Doubles) -> Doubles:
    """Return differences of scores; zero for words that are out, whose share is zero."""
    return np.where(np.isneginf(away), 0.0, away)


def _sign_of(sample: Doubles, span: tuple[float, float], limit: float, tail: float, tests: int = 1) -> int:
    """Say if the tail's share times the mean of numbers within a span lies above a limit: 1, below: -1, open: 0."""
    least, width = span[0], span[1] - span[0]
    shares = np.clip((sample - least) / width, 0, 1)
    against = np.divide(np.float64(limit), tail) - least
    return int(is_mean_above(shares[None], np.array([against / width]), tests)[0])
