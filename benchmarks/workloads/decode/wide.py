"""A vocabulary of 256,000 words, with a model trained on the spot: precision and speed-up as the vocabulary grows.

``python -m memhier.benchmarks.workloads.decode.wide`` trains an LSTM of 512 units on the Python sources of the machine,
of which 256,000 distinct words are its vocabulary, and asks it with hidden states over files that it was not trained
on. What was trained is kept for the next run.
Smaller vocabularies are the most frequent words of the same layer. One thread, processor time, interleaved rounds, each
call after 48 MB of other memory were touched, as by a model between two words, and warm beside it.
"""

import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console

from memhier.ann.decoder import LogitIndex
from memhier.benchmarks.bench.figures import Curves, Figure, Record, Series
from memhier.benchmarks.decode.clock import Ints, Way, measure, precision
from memhier.benchmarks.decode.layers import TrainedLayer
from memhier.benchmarks.decode.peers import full_products
from memhier.benchmarks.models.code import read_sources
from memhier.benchmarks.models.train import LstmModel, train
from memhier.benchmarks.peers.process import default_environments
from memhier.benchmarks.workloads.options import json_option

__all__ = ["main"]

K = 10
_ASKED, _LEARNED = 2048, 8192
_PIECE = 64  # words that are read from an empty state


def trained_layer(words: int, steps: int) -> tuple[TrainedLayer, dict[str, float]]:
    """Train, or take what was trained before; return the layer, with hidden states of both halves of unseen text."""
    file = default_environments().parent / "bench" / "decode" / f"sources-{words}-{steps}.npz"
    if not file.exists():
        arrays = _train(words, steps)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part.npz")
        np.savez(part, **arrays)
        part.replace(file)
    with np.load(file) as kept:
        layer = TrainedLayer(*(kept[name] for name in ("weight", "bias", "learned", "asked")))
        return layer, {name: float(kept[name]) for name in ("tokens", "loss_first", "loss_last", "train_s")}


def _train(words: int, steps: int) -> dict[str, Any]:
    tokens = read_sources(words)
    held = (_ASKED + _LEARNED) // _PIECE * _PIECE
    model = LstmModel(words)
    started = time.thread_time()
    losses = train(model, tokens[:-held], words, steps)
    seconds = time.thread_time() - started
    with torch.no_grad():
        states = model(torch.from_numpy(tokens[-held:].reshape(-1, _PIECE)))[0].reshape(held, -1).numpy()
    arrays = {
        "weight": model.head.weight.detach().numpy(), "bias": model.head.bias.detach().numpy(),
        "learned": states[:_LEARNED], "asked": states[_LEARNED:],
    }  # fmt: skip
    about = {"tokens": float(len(tokens)), "loss_first": losses[0], "loss_last": float(np.mean(losses[-50:]))}
    about["train_s"] = seconds
    return arrays | {name: np.array(value) for name, value in about.items()}


def truth_of(layer: TrainedLayer) -> Ints:
    """Return the words of the ten largest logits."""
    found = [
        np.argpartition(-(states @ layer.weight.T + layer.bias), K, axis=1)[:, :K]
        for states in np.array_split(layer.asked, 64)
    ]
    return np.concatenate(found)


def measure_layer(layer: TrainedLayer, rounds: int) -> dict[str, Any]:
    """Return precision and milliseconds of the ways, batch 1."""
    started = time.thread_time()
    index = LogitIndex.build(layer.weight, layer.bias, contexts=layer.learned, k=K, method="graph")
    build_s = time.thread_time() - started

    def answers(method: Any) -> Any:
        return lambda states: index.topk(states, method=method).indices

    ways = [Way(method, "", answers(method)) for method in ("graph", "screen", "preview")]
    full = list(full_products(layer))[:2]
    truth = truth_of(layer)
    ms, warm = measure([*full, *ways], layer.asked, 1, rounds).medians()
    row: dict[str, Any] = {"words": len(layer.weight), "build_s": build_s, "MiB": index.memory_bytes / 2**20, **ms}
    for way in ways:
        row[f"P@10, {way.name}"] = precision(way.answer(layer.asked), truth)
        row[f"{way.name} over fp32"] = ms["full, fp32"] / ms[way.name]
        row[f"{way.name} over bf16"] = ms["full, bf16"] / ms[way.name]
        row[f"{way.name} over fp32, warm"] = warm["full, fp32"] / warm[way.name]
        row[f"{way.name} over bf16, warm"] = warm["full, bf16"] / warm[way.name]
    return row


@click.command()
@click.option("--words", default=256_000, show_default=True, help="Of the vocabulary.")
@click.option("--steps", default=1500, show_default=True, help="Of training, 384 words each.")
@click.option("--rounds", default=60, show_default=True)
@json_option
def main(words: int, steps: int, rounds: int, out: Path | None) -> None:
    """Measure how speed-ups grow with the vocabulary."""
    torch.set_num_threads(1)
    layer, about = trained_layer(words, steps)
    torch.set_grad_enabled(False)
    console = Console(width=130)
    console.print(about)
    rows = []
    for some in (words // 16, words // 4, words):
        part = TrainedLayer(layer.weight[:some], layer.bias[:some], layer.learned, layer.asked)
        rows.append(measure_layer(part, rounds))
        console.print({name: float(f"{value:.4g}") for name, value in rows[-1].items()})
    figures, lines = [], []
    for way in ("graph", "screen", "preview"):
        for row in rows:
            figures.append(Figure.of(f"P@10, {way}, {row['words']:,} words", row[f"P@10, {way}"], "share", "more"))
            for over in (f"{way} over {base}{how}" for how in ("", ", warm") for base in ("fp32", "bf16")):
                name = f"{over}, {row['words']:,} words"
                figures.append(Figure.of(name, row[over], "times", "more", clock=True))
        lines.append(Series(way, [(row["words"], row[f"{way} over fp32"]) for row in rows]))
    curve = Curves("ten largest logits, batch 1", "words", "times faster than fp32", lines, log_x=True, log_y=True)
    if out is not None:
        scale = f"LSTM of 512 units, {steps:,} steps on {int(about['tokens']):,} words of Python sources"
        Record(figures, [curve], scale=scale).write(out, rows=rows, trained=about)


if __name__ == "__main__":
    main()
