"""A small GPT-2 of transformers, trained by the benchmark: seeded, and kept on disk."""

import hashlib
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from memhier.benchmarks.workloads.decode.language.text import Text
from memhier.benchmarks.workloads.decode.translator.sentences import END, PAD, Vocabulary
from memhier.benchmarks.workloads.decode.translator.training import Recipe, word_loss

__all__ = ["Shape", "Writer", "train_writer", "with_idle_layers"]

_LENGTH, _ROWS = 128, 8  # words of a text to learn from, and texts in a step
_BETAS, _CLIP = (0.9, 0.95), 1.0
_WARM_UP = 50  # steps
_KEPT = 100  # steps between two files
_LOSS = Recipe(head=2000, drawn=2000)


@dataclass(frozen=True, slots=True)
class Shape:
    """The settings of a model and its training; embeddings and the output layer share their numbers, as in GPT-2.

    Attributes
    ----------
    words
        The most of a vocabulary.
    width, layers, heads
        Of the model.
    steps
        Of 1,024 words each.
    rate
        Adam's highest, which falls to a tenth by a cosine.
    """

    words: int = 50_000
    width: int = 256
    layers: int = 4
    heads: int = 4
    steps: int = 300
    rate: float = 1e-3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Writer:
    """A trained model, its vocabulary, the mean loss of its last steps, and seconds of processor time it took."""

    model: GPT2LMHeadModel
    vocabulary: Vocabulary
    loss: float
    seconds: float


def train_writer(text: Text, shape: Shape, work: Path) -> Writer:
    """Return the model of a text, from the work folder as far as its training got before."""
    vocabulary = Vocabulary(text.learned, shape.words)
    words = torch.tensor([word for line in text.learned for word in (*vocabulary.encode(line), END)])
    torch.manual_seed(shape.seed)
    model = GPT2LMHeadModel(_config(len(vocabulary), shape))
    optimizer = torch.optim.Adam(model.parameters(), betas=_BETAS)
    file = work / f"writer-{_digest(text, shape)}.pt"
    losses: list[float] = []
    seconds = 0.0
    if file.exists():
        kept = torch.load(file, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        losses, seconds = kept["losses"], kept["seconds"]
    model.train()
    while len(losses) < shape.steps:
        started = time.process_time()
        for step in range(len(losses), min(shape.steps, len(losses) + _KEPT)):
            losses.append(_learn(model, optimizer, words, shape, step))
        seconds += time.process_time() - started
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses,
                    "seconds": seconds}, part)  # fmt: skip
        part.replace(file)
    last = losses[-_KEPT:]
    model.train(False)
    return Writer(model, vocabulary, sum(last) / len(last), seconds)


def with_idle_layers(writer: Writer, layers: int) -> GPT2LMHeadModel:
    """Return a copy of a model with more layers, which take their time but add nothing: its texts are the same.

    The last matrices of both halves of a layer are zero, as in a model whose layers have just been added.
    """
    config = GPT2Config(**(writer.model.config.to_dict() | {"n_layer": writer.model.config.n_layer + layers}))
    model: GPT2LMHeadModel = GPT2LMHeadModel(config)
    model.train(False)
    model.load_state_dict(writer.model.state_dict(), strict=False)
    blocks: Any = model.transformer.h
    for block in list(blocks)[writer.model.config.n_layer :]:
        for last in (block.attn.c_proj, block.mlp.c_proj):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
    return model


def _config(words: int, shape: Shape) -> GPT2Config:
    # No text ends of itself, so that all have the same length.
    return GPT2Config(
        vocab_size=words, n_positions=512, n_embd=shape.width, n_layer=shape.layers, n_head=shape.heads,
        bos_token_id=END, eos_token_id=None, pad_token_id=PAD, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


@torch.enable_grad()
def _learn(model: GPT2LMHeadModel, optimizer: torch.optim.Optimizer, words: Tensor, shape: Shape, step: int) -> float:
    """Take one step of the training; return its loss, in nats a word."""
    generator = torch.Generator().manual_seed(shape.seed * 1_000_003 + step)
    torch.manual_seed(shape.seed * 1_000_003 + step)  # of the words that a loss counts
    length = min(_LENGTH, len(words) - 2)
    starts = torch.randint(len(words) - length - 1, (_ROWS,), generator=generator)
    rows = words[starts[:, None] + torch.arange(length + 1)]
    done = step / shape.steps
    rate = shape.rate * min(1.0, (step + 1) / _WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * done))
    optimizer.param_groups[0]["lr"] = rate
    states: Any = model.transformer(rows[:, :-1]).last_hidden_state
    output: Any = model.lm_head
    loss = word_loss(output, states.flatten(0, 1), rows[:, 1:].flatten(), _LOSS)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
    optimizer.step()
    found = float(loss.detach())
    if not math.isfinite(found):
        raise ArithmeticError(f"step {step}: the loss is {found}")
    return found


def _digest(text: Text, shape: Shape) -> str:
    hasher = hashlib.blake2b(json.dumps([asdict(shape), torch.__version__]).encode(), digest_size=8)
    for line in text.learned:
        hasher.update(f"{line}\n".encode())
    return hasher.hexdigest()
