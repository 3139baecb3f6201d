"""Beam search over the likeliest words of each state, the same for every output layer."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor

from memhier.ann.decoder.module.proof import Proof
from memhier.benchmarks.workloads.decode.translator.model import Read, Translator
from memhier.benchmarks.workloads.decode.translator.sentences import BEGIN, END, PAD
from memhier.benchmarks.workloads.decode.translator.ways import Ways

__all__ = ["Choose", "Translations", "translate"]

Choose: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(slots=True)
class Translations:
    """Translations, and the processor time that they took.

    Attributes
    ----------
    words
        Numbers of the words of each sentence, in the order asked, without the end.
    steps, states
        Calls of the output layer, and hidden states that it answered.
    settled
        Hidden states of :class:`Ways` that took the full product for their log Z.
    layer_s, step_s
        Seconds of this thread in the output layer, and in whole steps.
    """

    words: list[list[int]]
    steps: int = 0
    states: int = 0
    settled: int = 0
    layer_s: float = 0.0
    step_s: float = 0.0


@torch.no_grad()
def translate(
    model: Translator, sentences: list[list[int]], choose: Choose | Ways, beam: int, batch: int
) -> Translations:
    """Translate sentences, those of one length in batches.

    A beam keeps the `beam` likeliest beginnings, ended ones among them, until all have ended. The best of these by
    the mean log-probability of a word is the translation.

    Parameters
    ----------
    model
        The translator.
    sentences
        Numbers of the words of each.
    choose
        Maps hidden states ``[n, D]`` to log-probabilities float32 ``[n, K]`` of words int64 ``[n, K]``, K at least
        `beam`. With :class:`Ways` bounds of log Z decide; the time of their decisions counts as the layer's.
    beam
        Beginnings kept for each sentence.
    batch
        Sentences at a time.
    """
    result = Translations([[] for _ in sentences])
    order = sorted(range(len(sentences)), key=lambda at: len(sentences[at]))
    for length, group in groupby(order, key=lambda at: len(sentences[at])):
        same = list(group)
        for start in range(0, len(same), batch):
            some = same[start : start + batch]
            read = model.read(torch.tensor([sentences[at] for at in some]).reshape(len(some), length))
            for at, words in zip(some, _search(model, read, choose, beam, 10 + 2 * length, result), strict=True):
                result.words[at] = words
    return result


def _search(
    model: Translator, read: Read, choose: Choose | Ways, beam: int, longest: int, result: Translations
) -> list[list[int]]:
    count = len(read.first)
    read = read.rows(torch.arange(count).repeat_interleave(beam))
    proof = Proof(choose.exact) if isinstance(choose, Ways) else None
    scores = torch.full((count, beam), -torch.inf, dtype=torch.float64 if proof else torch.float32)
    scores[:, 0] = 0  # all beginnings are one at first
    ended = torch.zeros(count, beam, dtype=torch.bool)
    written = torch.full((count, beam, 1), BEGIN)
    passed = torch.zeros(count, beam, 0, dtype=torch.int64)  # states that a beginning came by
    state: Tensor | None = None
    for _ in range(longest):
        started = time.thread_time()
        hidden, state = model(read, written[:, :, -1].reshape(-1, 1), state)
        # A beginning that has ended, or that is none, asks the layer nothing.
        live = torch.nonzero((~ended & (scores > -torch.inf)).reshape(-1))[:, 0]
        states = hidden[live, 0]
        asked = time.thread_time()
        if isinstance(choose, Ways):
            assert proof is not None
            values, words, low, high = choose.bounds(states)
            numbers = torch.zeros(count * beam, dtype=torch.int64)
            numbers[live] = proof.add(states, low, high)
            passed = torch.cat([passed, numbers.reshape(count, beam, 1)], 2)
        else:
            values, words = choose(states)
        result.layer_s += time.thread_time() - asked
        totals, following = _continued(scores, ended, live, values, words)
        asked = time.thread_time()
        if proof is None:
            places = torch.topk(totals.reshape(count, -1), beam).indices
        else:
            places = proof.best(totals, passed, beam)
            result.layer_s += time.thread_time() - asked
        parents, chosen = places // totals.shape[2], following.reshape(count, -1).gather(1, places)
        scores = totals.reshape(count, -1).gather(1, places)
        rows = (parents + beam * torch.arange(count)[:, None]).reshape(-1)
        state = state[rows]
        written, passed = (each.flatten(0, 1)[rows].reshape(each.shape) for each in (written, passed))
        written = torch.cat([written, chosen[:, :, None]], 2)
        ended = ended.gather(1, parents) | (chosen == END)
        result.step_s += time.thread_time() - started
        result.steps, result.states = result.steps + 1, result.states + len(live)
        if ended.all():
            break
    lengths = (written != PAD).sum(2) - 1
    if proof is None:
        best = (scores / lengths).argmax(1)
    else:
        best = proof.best(scores[:, :, None], passed, 1, lengths)[:, 0]
        result.settled += proof.settled
    return [_whole(row.tolist()) for row in written[torch.arange(count), best, 1:]]


def _continued(scores: Tensor, ended: Tensor, live: Tensor, values: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores of all continuations and their words, ``[n, beam, K]`` each."""
    k = values.shape[1]
    totals = torch.full((scores.numel(), k), -torch.inf, dtype=scores.dtype)
    totals[live] = scores.reshape(-1)[live, None] + values
    following = torch.full((scores.numel(), k), PAD)
    following[live] = words
    # One that has ended goes on as itself.
    totals[:, 0] = torch.where(ended.reshape(-1), scores.reshape(-1), totals[:, 0])
    return totals.reshape(*scores.shape, k), following.reshape(*scores.shape, k)


def _whole(words: list[int]) -> list[int]:
    return words[: words.index(END)] if END in words else words
