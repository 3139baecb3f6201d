"""Beam search over the likeliest words of each state, the same for every output layer."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor

from memhier.benchmarks.workloads.decode.translator.model import Read, Translator
from memhier.benchmarks.workloads.decode.translator.sentences import BEGIN, END, PAD

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
    layer_s, step_s
        Seconds of this thread in the output layer, and in whole steps.
    """

    words: list[list[int]]
    steps: int = 0
    states: int = 0
    layer_s: float = 0.0
    step_s: float = 0.0


@torch.no_grad()
def translate(model: Translator, sentences: list[list[int]], choose: Choose, beam: int, batch: int) -> Translations:
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
        `beam`.
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
    model: Translator, read: Read, choose: Choose, beam: int, longest: int, result: Translations
) -> list[list[int]]:
    count = len(read.first)
    read = read.rows(torch.arange(count).repeat_interleave(beam))
    scores = torch.full((count, beam), -torch.inf)
    scores[:, 0] = 0  # all beginnings are one at first
    ended = torch.zeros(count, beam, dtype=torch.bool)
    written = torch.full((count, beam, 1), BEGIN)
    state: Tensor | None = None
    for _ in range(longest):
        started = time.thread_time()
        hidden, state = model(read, written[:, :, -1].reshape(-1, 1), state)
        # A beginning that has ended, or that is none, asks the layer nothing.
        live = torch.nonzero((~ended & (scores > -torch.inf)).reshape(-1))[:, 0]
        states = hidden[live, 0]
        asked = time.thread_time()
        log_probs, words = choose(states)
        result.layer_s += time.thread_time() - asked
        scores, parents, chosen = _extended(scores, ended, live, log_probs, words)
        rows = (parents + beam * torch.arange(count)[:, None]).reshape(-1)
        state = state[rows]
        written = torch.cat([written.reshape(count * beam, -1)[rows].reshape(count, beam, -1), chosen[:, :, None]], 2)
        ended = ended.gather(1, parents) | (chosen == END)
        result.step_s += time.thread_time() - started
        result.steps, result.states = result.steps + 1, result.states + len(live)
        if ended.all():
            break
    lengths = (written != PAD).sum(2) - 1
    best = (scores / lengths).argmax(1)
    return [_whole(row.tolist()) for row in written[torch.arange(count), best, 1:]]


def _extended(
    scores: Tensor, ended: Tensor, live: Tensor, log_probs: Tensor, words: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores, parents and words of the best continuations, ``[n, beam]`` each."""
    count, beam = scores.shape
    k = log_probs.shape[1]
    totals = torch.full((count * beam, k), -torch.inf)
    totals[live] = scores.reshape(-1)[live, None] + log_probs
    following = torch.full((count * beam, k), PAD)
    following[live] = words
    # One that has ended goes on as itself.
    totals[:, 0] = torch.where(ended.reshape(-1), scores.reshape(-1), totals[:, 0])
    best, places = torch.topk(totals.reshape(count, -1), beam)
    return best, places // k, following.reshape(count, -1).gather(1, places)


def _whole(words: list[int]) -> list[int]:
    return words[: words.index(END)] if END in words else words
