"""The training of the translator: seeded, repeatable, and kept after every epoch."""

import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from memhier.benchmarks.workloads.decode.translator.model import Translator
from memhier.benchmarks.workloads.decode.translator.sentences import (
    BEGIN,
    END,
    LONGEST,
    PAD,
    UNKNOWN,
    Corpus,
    Vocabulary,
)

__all__ = ["Batch", "Recipe", "Trained", "batches_of", "optimizers_of", "train", "word_loss"]

_BETAS = (0.9, 0.98)
_UNKNOWN_SHARE = 0.3  # of the source words seen once, so that the model learns what an unknown word is


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of a training.

    Attributes
    ----------
    width, dropout
        Of the model.
    epochs, batch, rate
        Passes over the pairs, sentences in a step, and Adam's first rate, which falls linearly to a twentieth.
    head, drawn
        The loss of a step counts the first `head` words, all words of the batch, and so many of the others drawn
        evenly, each of which stands for as many as were not drawn: an unbiased estimate of Z. Drawn is a multiple
        cheaper than all; 0 counts all words.
    words
        The most of a vocabulary.
    seed
        Decides on first weights, order, dropout and drawn words.
    """

    width: int = 256
    dropout: float = 0.2
    epochs: int = 8
    batch: int = 64
    rate: float = 1.5e-3
    head: int = 500
    drawn: int = 500
    words: int = 50_000
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Trained:
    """A translator with its vocabularies, the loss of each epoch, and seconds of processor time that it took.

    `name` is a hash of the recipe and of the pairs.
    """

    name: str
    model: Translator
    source: Vocabulary
    target: Vocabulary
    losses: list[float]
    seconds: float


@dataclass(frozen=True, slots=True)
class Batch:
    """Sentences of one length, int64 ``[n, length]``, the words written before each word, and the words themselves."""

    source: Tensor
    before: Tensor
    words: Tensor


def batches_of(pairs: list[tuple[list[int], list[int]]], size: int, random: np.random.Generator) -> Iterator[Batch]:
    """Yield pairs of word numbers in random batches: sentences of one length, with their translations."""
    order = random.permutation(len(pairs))
    lengths = np.array([len(pairs[at][0]) for at in order])
    groups = []
    for length in np.unique(lengths):
        same = order[lengths == length]
        groups += [same[start : start + size] for start in range(0, len(same), size)]
    for group in random.permutation(len(groups)):
        some = [pairs[at] for at in groups[group]]
        longest = 1 + max(len(target) for _, target in some)
        written = np.full((len(some), longest + 1), PAD)
        for row, (_, target) in zip(written, some, strict=True):
            row[: len(target) + 2] = [BEGIN, *target, END]
        numbers = torch.from_numpy(written)
        before = torch.where(numbers[:, :-1] == END, PAD, numbers[:, :-1])
        yield Batch(torch.tensor([source for source, _ in some]), before, numbers[:, 1:])


def train(corpus: Corpus, recipe: Recipe, work: Path) -> Trained:
    """Return the translator of a corpus, from the work folder as far as it got before.

    Every epoch begins with seeds of its own and ends with a file, so a training that goes on gives the same weights as
    one in one piece.
    """
    source = Vocabulary((pair[0] for pair in corpus.train), recipe.words)
    target = Vocabulary((pair[1] for pair in corpus.train), recipe.words)
    torch.manual_seed(recipe.seed)
    model = Translator(len(source), len(target), recipe.width, recipe.dropout)
    optimizers = optimizers_of(model)
    name = _digest(corpus, recipe)
    file = work / f"translator-{name}.pt"
    losses: list[float] = []
    seconds = 0.0
    if file.exists():
        kept = torch.load(file, weights_only=True)
        model.load_state_dict(kept["model"])
        for optimizer, state in zip(optimizers, kept["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        losses, seconds = kept["losses"], kept["seconds"]
    pairs = [(source.encode(first), target.encode(second)) for first, second in corpus.train]
    pairs = [(first, second) for first, second in pairs if len(first) <= LONGEST and len(second) <= LONGEST]
    rare = torch.tensor([count == 1 for count in source.counts])
    for epoch in range(len(losses), recipe.epochs):
        started = time.process_time()
        losses.append(_epoch(model, optimizers, pairs, rare, recipe, epoch))
        seconds += time.process_time() - started
        _keep(file, {"model": model.state_dict(), "optimizers": [each.state_dict() for each in optimizers],
                     "losses": losses, "seconds": seconds})  # fmt: skip
    return Trained(name, model.eval(), source, target, losses, seconds)


def optimizers_of(model: Translator) -> list[torch.optim.Optimizer]:
    """Return Adam for the layers, and Adam for the rows of the tables that a step uses."""
    tables = [model.source.weight, model.target.weight]
    rest = [one for one in model.parameters() if all(one is not table for table in tables)]
    return [torch.optim.Adam(rest, betas=_BETAS), torch.optim.SparseAdam(tables, betas=_BETAS)]


def _digest(corpus: Corpus, recipe: Recipe) -> str:
    hasher = hashlib.blake2b(json.dumps([asdict(recipe), torch.__version__]).encode(), digest_size=8)
    for first, second in corpus.train:
        hasher.update(f"{first}\t{second}\n".encode())
    return hasher.hexdigest()


def _keep(file: Path, state: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    torch.save(state, part)
    part.replace(file)


def _epoch(
    model: Translator,
    optimizers: list[torch.optim.Optimizer],
    pairs: list[tuple[list[int], list[int]]],
    rare: Tensor,
    recipe: Recipe,
    epoch: int,
) -> float:
    """Train on all pairs once, and return the mean loss of a word in nats."""
    torch.manual_seed(recipe.seed * 100_003 + epoch + 1)
    model.train()
    batches = list(batches_of(pairs, recipe.batch, np.random.default_rng([recipe.seed, epoch])))
    total, words = 0.0, 0
    with torch.enable_grad():
        for step, batch in enumerate(batches):
            done = (epoch + step / len(batches)) / recipe.epochs
            rate = recipe.rate * max(0.05, min(1.0, 1.5 * (1 - done)))
            hidden = rare[batch.source] & (torch.rand(batch.source.shape) < _UNKNOWN_SHARE)
            states, _ = model(model.read(batch.source.masked_fill(hidden, UNKNOWN)), batch.before)
            wanted = batch.words != PAD
            loss = word_loss(model.output, states[wanted], batch.words[wanted], recipe)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(optimizers[0].param_groups[0]["params"], 1.0)
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = rate
                optimizer.step()
                optimizer.zero_grad()
            total, words = total + loss.item() * int(wanted.sum()), words + int(wanted.sum())
    mean = total / words
    if not math.isfinite(mean):
        raise ArithmeticError(f"epoch {epoch}: the loss is {mean}")
    return mean


def word_loss(output: nn.Linear, states: Tensor, words: Tensor, recipe: Recipe) -> Tensor:
    """Return the mean loss of a word, over all words or the ones that `recipe` counts."""
    total = output.out_features
    kept = torch.zeros(total, dtype=torch.bool)
    kept[: recipe.head] = True
    kept[words] = True
    certain, others = torch.nonzero(kept)[:, 0], torch.nonzero(~kept)[:, 0]
    if recipe.drawn and len(others) > recipe.drawn:
        # Each drawn word stands for so many.
        share, others = math.log(len(others) / recipe.drawn), others[torch.randint(len(others), (recipe.drawn,))]
    else:
        share = 0.0
    rows = torch.cat([certain, others])
    more = torch.where(torch.arange(len(rows)) < len(certain), 0.0, share)
    weight = nn.functional.embedding(rows, output.weight, sparse=True)
    bias = more if output.bias is None else output.bias[rows] + more
    logits = nn.functional.linear(states, weight, bias)
    return nn.functional.cross_entropy(logits, torch.searchsorted(certain, words))
