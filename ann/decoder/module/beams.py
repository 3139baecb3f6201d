"""Beams of ``generate`` that are those of the full layer: every choice by proven bounds of log Z.

It stands for the processors of a call with beams, and follows the texts from step to step, with the hidden states on
their ways. Transformers add up the scores that it returns; where bounds leave a choice of theirs open, it takes the
full product of single states first (:mod:`memhier.ann.decoder.module.proof`), and the scores make up for the log Z
that earlier ones had left out. A text that ends has its exact score, which is compared with those of other lengths.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from memhier.ann.decoder.index import LogitIndex
from memhier.ann.decoder.layer import norm_rounding
from memhier.ann.decoder.module.generation import Need
from memhier.ann.decoder.module.proof import Proof
from memhier.ann.decoder.module.sampling import HEAD_WORDS

__all__ = ["BeamSteps", "Search", "search_of"]

# Processors that take words out and leave all others as they are, or give one word alone the score zero.
_RULING = frozenset(
    f"{name}LogitsProcessor"
    for name in (
        "ForcedBOSToken", "ForcedEOSToken",
        "MinLength", "MinNewTokensLength", "NoBadWords", "NoRepeatNGram", "SuppressTokens", "SuppressTokensAtBegin",
    )
)  # fmt: skip
_SAME = -1.0  # a score for all words: below that of a forced word, and above one that is out
_SUM_ROUNDING = 1e-5  # of a sum of exp in single precision, as a share
# Once a fourth of a search's states took the full product, counted as this many at least, all that follow take it: one
# product for all texts of a step costs less than bounds and several products for single states.
_TRIAL = 32


@dataclass(frozen=True, slots=True)
class Search:
    """The settings of a beam search of transformers.

    Attributes
    ----------
    beams, longest
        Texts kept for each sentence, and the most words of one, its beginning included.
    ends
        Words that end a text.
    words
        How many of the largest logits of each state it looks at.
    penalty, early
        The power of the length that divides the score of an ended text, and whether the search stops early.
    """

    beams: int
    longest: int
    ends: tuple[int, ...]
    words: int
    penalty: float
    early: bool | str


def search_of(config: Any, processors: Any, words: int) -> Search | str:
    """Return the search of a call, or the name of its first option or processor that is not understood.

    Parameters
    ----------
    config
        As transformers have prepared it.
    words
        How many of the largest logits a state needs.
    """
    for each in processors:
        name = type(each).__name__
        if name not in _RULING or type(each).__module__.split(".")[0] != "transformers":
            return f"num_beams and {name}"
    if config.max_length is None or getattr(config, "stop_strings", None) or getattr(config, "max_time", None):
        return "num_beams and a stop"
    ends = config.eos_token_id
    listed = () if ends is None else tuple(ends) if isinstance(ends, list | tuple) else (int(ends),)
    return Search(
        config.num_beams, config.max_length, listed, words, float(config.length_penalty), config.early_stopping
    )


class Accelerated(Protocol):
    """The layer of an accelerated model."""

    head: nn.Linear

    def count(self, rows: int, reason: str) -> None:
        """Count rows that took the full layer."""

    def prover(self) -> LogitIndex:
        """Return the index with codes of all directions."""


@dataclass(slots=True)
class _Texts:
    """The texts of a step: each row's own, `n` sentences of `b` beams.

    Attributes
    ----------
    written
        int64 ``[n, b, t]``.
    sums
        float64 ``[n, b]``: sums of logits; minus infinity for a row that stands for no text.
    given
        float64 ``[n, b]``: the sums of log Z that the scores so far hold.
    ways
        int64 ``[n, b, s]``: numbers of the states.
    values, words
        float64 and int64 ``[n, b, k]``: the likeliest words that follow, and their logits.
    """

    written: Tensor
    sums: Tensor
    given: Tensor
    ways: Tensor
    values: Tensor
    words: Tensor


class BeamSteps:
    """Stands for a list of processors; finds the scores of the words that decide a step.

    Parameters
    ----------
    head
        The layer.
    need
        The needs of the call; the layer leaves hidden states there.
    processors
        The list: each takes words out or forces one.
    """

    def __init__(self, head: Accelerated, need: Need, processors: Any, search: Search) -> None:
        self._head, self._need, self._processors, self._search = head, need, processors, search
        self._proof = Proof(self._exact)
        self._before: _Texts | None = None
        self._begun = 0
        self._ended: list[list[float]] = []
        self._states = self._full = 0  # states so far, and those that took the full product
        self._bounded = True

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores in which the full layer's choices come out."""
        hidden, self._need.hidden = self._need.hidden, None
        if hidden is None or len(hidden) != len(scores):
            raise RuntimeError(f"{len(scores)} texts, but the output layer did not leave their hidden states")
        texts = self._texts(input_ids)
        shown = self._processors(input_ids, torch.full_like(scores, _SAME)) if len(self._processors) else None
        shape, k = texts.sums.shape, self._search.words
        texts.values = torch.full((len(scores), k), -torch.inf, dtype=torch.float64)
        texts.words = torch.arange(k).repeat(len(scores), 1)
        numbers = torch.zeros(len(scores), dtype=torch.int64)
        live = torch.nonzero(texts.sums.reshape(-1) > -torch.inf)[:, 0]
        if shown is not None and bool((shown > _SAME).any()):  # one word is forced: its probability is one
            texts.words = (shown.argmax(1, keepdim=True) + texts.words) % scores.shape[1]
            texts.values[live, 0] = 0
        else:
            states = hidden[live].float()
            values, texts.words[live], low, high = self._bounds(states)
            texts.values[live], numbers[live] = values.double(), self._proof.add(states, low, high)
            if shown is not None:
                texts.values.masked_fill_(shown.gather(1, texts.words) < 2 * _SAME, -torch.inf)
        texts.ways = torch.cat([texts.ways, numbers.reshape(*shape, 1)], 2)
        texts.values, texts.words = (each.reshape(*shape, k) for each in (texts.values, texts.words))
        self._decide(texts)
        given = self._proof.bounds(texts.ways)[0]
        found = (texts.values - (given - texts.given)[..., None]).reshape(len(scores), k)
        texts.given = given
        self._before = texts
        self._proof.keep(texts.ways)
        chosen = torch.full(scores.shape, -torch.inf, dtype=scores.dtype)
        return chosen.scatter_(1, texts.words.reshape(len(scores), k), found.to(scores.dtype))

    def _texts(self, input_ids: Tensor) -> _Texts:
        """Return the texts of this step, each after the one that it goes on with."""
        beams, before = self._search.beams, self._before
        count = len(input_ids) // beams
        written = input_ids.reshape(count, beams, input_ids.shape[1])  # no word yet where embeddings are given
        if before is None:
            self._begun, self._ended = written.shape[2], [[] for _ in range(count)]
            sums = torch.full((count, beams), -torch.inf, dtype=torch.float64)
            sums[:, 0] = 0  # all beginnings are one at first
            nothing = torch.empty(0)
            given, ways = torch.zeros_like(sums), torch.zeros(count, beams, 0, dtype=torch.int64)
            return _Texts(written, sums, given, ways, nothing, nothing)
        same = (written[:, :, None, :-1] == before.written[:, None]).all(3)  # [n, b, b before]
        same &= before.sums[:, None] > -torch.inf
        sentence, parent = torch.arange(count)[:, None], same.long().argmax(2)
        follows = before.words[sentence, parent] == written[:, :, -1:]
        value = before.values[sentence, parent].masked_fill(~follows, -torch.inf).amax(2)
        sums = before.sums[sentence, parent] + value
        out = ~same.any(2) | torch.isin(written[:, :, -1], torch.tensor(self._search.ends, dtype=torch.int64))
        nothing = torch.empty(0)
        return _Texts(
            written, sums.masked_fill(out, -torch.inf), before.given[sentence, parent],
            before.ways[sentence, parent], nothing, nothing,
        )  # fmt: skip

    def _bounds(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the largest logits and their words, ``[n, k]``, and bounds of log Z, float64 ``[n]``."""
        self._bounded = self._bounded and 4 * self._full <= max(_TRIAL, self._states)
        self._states += len(states)
        if not self._bounded:
            every = self._all(states)
            values, words = torch.topk(every, self._search.words)
            exact = every.double().logsumexp(1)
            return values, words, exact, exact
        index = self._head.prover()
        found = index.envelope(states.numpy(), max(HEAD_WORDS, self._search.words))
        logits = torch.from_numpy(found.logits)
        values, places = torch.topk(logits, self._search.words)
        words = torch.from_numpy(found.rows).gather(1, places)
        low = logits.double().logsumexp(1)
        high = torch.logaddexp(low, torch.from_numpy(found.log_sum))
        slack = _SUM_ROUNDING + norm_rounding(states.shape[1]) * states.double().norm(dim=1) * index.largest_norm
        low, high = low - slack, high + slack
        open_ = torch.nonzero(values[:, -1] <= torch.from_numpy(found.cut))[:, 0]
        if len(open_):  # another word may be among these
            every = self._all(states[open_])
            values[open_], words[open_] = torch.topk(every, self._search.words)
            low[open_] = high[open_] = every.double().logsumexp(1)
        return values, words, low, high

    def _exact(self, states: Tensor) -> Tensor:
        return self._all(states).double().logsumexp(1)

    def _all(self, states: Tensor) -> Tensor:
        self._head.count(len(states), "not proven")
        self._full += len(states)
        found: Tensor = self._head.head(states)
        return found

    def _decide(self, texts: _Texts) -> None:
        """Prove every choice that the search makes of the continuations of this step."""
        beams, proof = self._search.beams, self._proof
        totals = texts.sums[..., None] + texts.values
        places = proof.best(totals, texts.ways, beams)
        k = totals.shape[2]
        ends = torch.isin(texts.words, torch.tensor(self._search.ends, dtype=torch.int64)).reshape(len(totals), -1)
        last = texts.written.shape[2] + 1 >= self._search.longest
        final = torch.ones_like(places, dtype=torch.bool) if last else ends.gather(1, places)
        sentences, which = torch.nonzero(final, as_tuple=True)
        if len(sentences):
            proof.settle(texts.ways[sentences, places[sentences, which] // k])
        if last:
            return
        # The search goes on with the best that have not ended.
        open_ = totals.reshape(len(totals), -1).masked_fill(ends, -torch.inf).reshape(totals.shape)
        running = proof.best(open_, texts.ways, beams) if ends.any() else places
        length = texts.written.shape[2] + 1 - self._begun
        for sentence, place in zip(sentences.tolist(), places[sentences, which].tolist(), strict=True):
            score = totals[sentence].reshape(-1)[place] - proof.bounds(texts.ways[sentence, place // k])[0]
            self._ended[sentence].append(float(score) / length**self._search.penalty)
        self._compare(totals, texts.ways, running, length)

    def _compare(self, totals: Tensor, ways: Tensor, running: Tensor, length: int) -> None:
        """Settle the running texts that may be the best of their sentence, where ended ones are near."""
        if not any(self._ended):
            return
        if self._search.early == "never" and self._search.penalty > 0:
            length = self._search.longest - self._begun
        power = length**self._search.penalty
        k = totals.shape[2]
        for sentence, others in enumerate(self._ended):
            while others:
                parents = running[sentence] // k
                low, high = self._proof.bounds(ways[sentence, parents])
                sums = totals[sentence].reshape(-1)[running[sentence]]
                least, most = float((sums - high).max()) / power, float((sums - low).max()) / power
                wide = (high > low) & (sums - low >= (sums - high).max())
                if not bool(wide.any()) or not any(least <= other <= most for other in others):
                    break
                self._proof.settle(ways[sentence, parents[wide]])
