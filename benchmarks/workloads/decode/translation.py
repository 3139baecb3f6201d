"""Machine translation: BLEU by beam against the time of an output step, for the full layer, decoders and rivals.

``python -m memhier.benchmarks.workloads.decode.translation`` trains a small GRU with attention on Multi30k, English to
German, or on the sentence pairs of ``--source`` and ``--target``, with a vocabulary of whole words, and keeps its
weights in ``--work``: a training that was cut short goes on, and the next run translates at once. One beam search asks
every output layer for the likeliest words of each state. BLEU is sacrebleu's, of the translations of all held-out
sentences in batches. Times are processor time of one thread, of sentences one at a time, every layer by turns; between
two calls of the layer the translator does its own work. Adaptive softmax begins as the trained layer and learns from
its hidden states.
"""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from memhier.benchmarks.bench.figures import Curves, Record, Series
from memhier.benchmarks.peers.process import default_environments
from memhier.benchmarks.workloads.decode.heads import (
    Head,
    adaptive_softmax,
    full_layers,
    graphs_of_faiss,
    svd_softmax,
    top_k_softmax,
)
from memhier.benchmarks.workloads.decode.translator.beams import translate
from memhier.benchmarks.workloads.decode.translator.sentences import PAD, Corpus, generated, load
from memhier.benchmarks.workloads.decode.translator.training import Recipe, Trained, batches_of, train
from memhier.benchmarks.workloads.harness import Measure, Outcome, Row, figures_of, rows_table, workload

__all__ = ["main"]

K = 10
BATCH = 32
CONTEXTS, STATES = 4_000, 200_000
BASE = "full, fp32"

BLEU = Measure("bleu", "BLEU", "points", "more")
APART = Measure("difference", "BLEU beyond the full layer's", "points", "more")
TIMES = [
    Measure("layer_ms", "output layer of a step", "ms", "less", clock=True),
    Measure("step_ms", "whole step", "ms", "less", clock=True),
    Measure("over_fp32", "output layer, speed-up over fp32", "times", "more", clock=True),
    Measure("over_bf16", "output layer, speed-up over bf16", "times", "more", clock=True),
]


def bleu_scorer() -> Any:
    """Return sacrebleu.

    Raises
    ------
    click.ClickException
        When it is not installed.
    """
    try:
        return import_module("sacrebleu")
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"{error.name} is not installed: memhier bench install decode, or pip install sacrebleu"
        ) from error


@torch.no_grad()
def learned_states(trained: Trained, corpus: Corpus, most: int) -> tuple[Tensor, Tensor]:
    """Return hidden states of the sentences to learn from, float32 ``[n, D]``, and the words that follow them."""
    pairs = [(trained.source.encode(first), trained.target.encode(second)) for first, second in corpus.train]
    states: list[Tensor] = []
    words: list[Tensor] = []
    count = 0
    for batch in batches_of(pairs, BATCH, np.random.default_rng(0)):
        hidden, _ = trained.model(trained.model.read(batch.source), batch.before)
        wanted = batch.words != PAD
        states.append(hidden[wanted])
        words.append(batch.words[wanted])
        count += len(states[-1])
        if count >= most:
            break
    return torch.cat(states), torch.cat(words)


def heads_of(trained: Trained, corpus: Corpus, work: Path, name: str, peers: bool) -> Iterator[Head]:
    """Yield every output layer, the trained one first."""
    layer = trained.model.output
    states, words = learned_states(trained, corpus, STATES if peers else CONTEXTS)
    yield from full_layers(layer, K)
    yield from top_k_softmax(layer, K, states[:CONTEXTS])[1]
    if peers:
        yield adaptive_softmax(layer, K, states, words, work / f"adaptive-{name}.pt")
        yield svd_softmax(layer, K, max(1, layer.in_features // 4), max(K, layer.out_features // 32))
        yield from graphs_of_faiss(layer, K, (50, 200))


def scores(trained: Trained, corpus: Corpus, heads: list[Head], beams: list[int]) -> list[Row]:
    """Return BLEU of every layer and beam, and the share of sentences as the full layer translates them.

    With bounds of log Z, `settled` is the share of hidden states that took the full product.
    """
    bleu = bleu_scorer()
    sources = [trained.source.encode(first) for first, _ in corpus.test]
    references = [[second for _, second in corpus.test]]
    rows: list[Row] = []
    for beam in beams:
        full: tuple[list[list[int]], float] | None = None
        for head in heads:
            done = translate(trained.model, sources, head.choose, beam, BATCH)
            words = done.words
            score = bleu.corpus_bleu([trained.target.decode(each) for each in words], references).score
            full = full or (words, score)
            same = float(np.mean([one == other for one, other in zip(words, full[0], strict=True)]))
            row: Row = {"layer": head.name, "beam": beam, "bleu": score, "difference": score - full[1], "same": same}
            rows.append(row | {"settled": done.settled / done.states})
    return rows


def times(trained: Trained, corpus: Corpus, heads: list[Head], beam: int, sentences: int) -> dict[str, Row]:
    """Return medians of milliseconds of a step by layer, over sentences one at a time, every layer by turns."""
    taken: dict[str, list[tuple[float, float]]] = {head.name: [] for head in heads}
    for turn in range(-1, min(sentences, len(corpus.test))):  # the first one warms up
        source = [trained.source.encode(corpus.test[max(turn, 0)][0])]
        for head in heads:
            done = translate(trained.model, source, head.choose, beam, 1)
            if turn >= 0:
                taken[head.name].append((1e3 * done.layer_s / done.steps, 1e3 * done.step_s / done.steps))
    medians = {name: np.median(rounds, axis=0) for name, rounds in taken.items()}
    return {
        name: {
            "layer_ms": float(layer),
            "step_ms": float(step),
            "over_fp32": float(medians[BASE][0] / layer),
            "over_bf16": float(medians["full, bf16"][0] / layer),
        }
        for name, (layer, step) in medians.items()
    }


def record(rows: list[Row], corpus: Corpus, words: int, width: int) -> Record:
    """Return figures and the curve."""
    how = "{title}, {layer}, beam {beam}"
    figures = [*figures_of(rows, [BLEU, *TIMES], how)]
    figures += figures_of([row for row in rows if row["layer"] != BASE], [APART], how)
    names = list(dict.fromkeys(row["layer"] for row in rows))
    lines = [
        Series(name, sorted((row["layer_ms"], row["bleu"]) for row in rows if row["layer"] == name)) for name in names
    ]
    title = f"translation, {words:,} words x {width}, by beam"
    curve = Curves(title, "ms of processor time in the output layer, a step of one sentence", "BLEU", lines, log_x=True)
    return Record(figures, [curve], scale=f"{corpus.name}: {words:,} words, one thread of a CPU")


def _numbers(_: object, option: click.Parameter, text: str) -> list[int]:
    try:
        beams = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: expected numbers between commas, such as 1,5,10") from error
    if not all(1 <= beam <= K for beam in beams):
        raise click.BadParameter(f"{text!r}: expected beams of 1 to {K}, the words that every layer returns")
    return beams


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@workload
@click.option("--source", type=_FILE, help="Sentences, one a line, or pairs with a tab between (.gz, too).")
@click.option("--target", type=_FILE, help="Their translations, one a line.")
@click.option("--generated", "made", type=click.IntRange(100), help="So many pairs of a made language instead.")
@click.option("--held-out", type=click.IntRange(1), default=1000, show_default=True, help="Sentences to translate.")
@click.option("--beams", default="1,5,10", show_default=True, callback=_numbers)
@click.option("--timed", type=click.IntRange(1), default=30, show_default=True, help="Sentences to time.")
@click.option("--width", type=click.IntRange(16), default=Recipe().width, show_default=True)
@click.option("--epochs", type=click.IntRange(1), default=Recipe().epochs, show_default=True)
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), help="A folder that keeps trained weights.")
@click.option("--peers/--no-peers", default=True, show_default=True)
def main(
    *, source: Path | None, target: Path | None, made: int | None, held_out: int, beams: list[int], timed: int,
    width: int, epochs: int, work: Path | None, peers: bool,
) -> Outcome:  # fmt: skip
    """Compare output layers of a translator."""
    bleu_scorer()  # missing is told before the training
    corpus = generated(made, held_out, max(20, made // 50)) if made else load(source, target, held_out)
    recipe = Recipe(width=width, epochs=epochs)
    folder = work or default_environments().parent / "bench" / "decode"
    trained = train(corpus, recipe, folder)
    with torch.no_grad():
        heads = list(heads_of(trained, corpus, folder, trained.name, peers))
        rows = scores(trained, corpus, heads, beams)
        spent = {beam: times(trained, corpus, heads, beam, timed) for beam in beams}
    rows = [row | spent[row["beam"]][row["layer"]] for row in rows]
    held = [{"layer": head.name, "MiB": head.memory / 2**20, "build_s": head.build_s} for head in heads]
    words = len(trained.target)
    told = (
        f"{corpus.name}: {len(corpus.train):,} pairs to learn from, {len(corpus.test):,} held out; {words:,} words x "
        f"{width}; {epochs} epochs in {trained.seconds:,.0f} s of processor time, loss {trained.losses[-1]:.2f}"
    )
    shown: list[Table | str] = [told, rows_table("one sentence at a time", rows), rows_table("beside the layer", held)]
    return Outcome(record(rows, corpus, words, width), shown, {"rows": rows, "layers": held, "losses": trained.losses})


if __name__ == "__main__":
    main()
