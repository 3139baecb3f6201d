"""Whether the words of the step before are worth starting a walk from: precision against rows looked at, step by step.

``python -m memhier.benchmarks.workloads.decode.steps`` prints the table. Contexts follow each other as in writing:
hidden states over the test text of Penn Treebank, and over sequences of a layer of 50,000 words. Each walk starts from
the seeds of its nearest groups, with or without the ten largest of the step before, or of the last eight steps.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from memhier.ann.decoder import LogitIndex
from memhier.ann.decoder.engine.dram_engine import DramEngine
from memhier.ann.decoder.engine.engine import Effort, Walk
from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.datasets import data_folder
from memhier.benchmarks.decode.layers import load_domains
from memhier.benchmarks.decode.ptb import Floats, Lstm, read_tokens
from memhier.benchmarks.workloads.options import json_option

__all__ = ["main"]

K = 10
_PROBES = (1, 4)
_BEFORE = (0, 1, 8)
_EFS = (16, 24, 32, 64)


class SeededWalks:
    """Walks from seeds that are given for each context, over the graph of an index."""

    def __init__(self, index: LogitIndex) -> None:
        layer = index.layer
        assert layer is not None
        self._engine, self._layer = index._engine, layer
        self._codes = self._engine.codes
        graph = self._codes.graph
        assert graph is not None
        self._graph = graph

    def groups(self, states: Floats) -> Any:
        """Return the groups in ascending order of distance, int64 ``[n, groups]``."""
        z = self._codes.projection(states)[:, : self._graph.centres.shape[1]]
        return np.argsort(self._graph.halves - z @ self._graph.centres.T, axis=1, kind="stable")

    def seeds(self, groups: Any) -> list[Any]:
        """Return the seeds of some groups."""
        starts = self._graph.starts
        return [self._graph.seeds[starts[group] : starts[group + 1]] for group in groups]

    def walk(self, state: Floats, seeds: list[Any], ef: int) -> tuple[Any, Any, int]:
        """Return logits and words of the ten largest found, and how many rows were looked at."""
        planted = np.unique(np.concatenate(seeds))
        # One group of all of them, wherever it lies.
        graph = replace(
            self._graph, seeds=planted, starts=np.array([0, len(planted)]),
            centres=self._graph.centres[:1].copy(), halves=self._graph.halves[:1].copy(),
        )  # fmt: skip
        looked = np.empty(1, np.int64)
        engine = DramEngine(replace(self._codes, graph=graph), self._layer)
        found = engine.walk(state[None], K, Walk(Effort(1, ef, max(ef, K))), looked=looked)
        return found.values[0], found.indices[0], int(looked[0])


def measure_steps(name: str, index: LogitIndex, sequences: Floats) -> list[dict[str, Any]]:
    """Return precision and rows looked at, by where walks start and how long their list is.

    Parameters
    ----------
    sequences
        Hidden states of consecutive steps, float32 ``[n, t, D]``.
    """
    walks, rows = SeededWalks(index), []
    states = np.ascontiguousarray(sequences.reshape(-1, sequences.shape[2]))
    kth = np.sort(index.logits(states), 1)[:, -K]
    groups = walks.groups(states)
    for probes in _PROBES:
        for before in _BEFORE:
            for ef in _EFS:
                right = looked = 0
                last: list[Any] = []
                for step, state in enumerate(states):
                    if step % sequences.shape[1] == 0:
                        last = []
                    seeds = walks.seeds(groups[step, :probes]) + last[len(last) - min(before, len(last)) :]
                    values, words, count = walks.walk(state, seeds, ef)
                    last = [*last, words[words >= 0].astype(np.uint32)][-max(_BEFORE) :]
                    right += int((values >= kth[step] - 1e-4).sum())
                    looked += count
                rows.append(
                    {
                        "contexts": name, "groups": probes, "steps before": before, "list": ef,
                        "P@10": right / (K * len(states)), "looked at": looked / len(states),
                    }
                )  # fmt: skip
    return rows


@click.command()
@click.option("--steps", default=250, show_default=True, help="Of each of four sequences, at most 250.")
@json_option
def main(steps: int, out: Path | None) -> None:
    """Measure what seeds of the step before change."""
    model = Lstm.load()
    learned, _ = model.read(read_tokens("train")[:8001], 8)
    asked, _ = model.read(read_tokens("test")[: 4 * steps + 1], 4)
    index = LogitIndex.build(model.weight, model.bias, contexts=learned, k=K, method="graph")
    rows = measure_steps("Penn Treebank", index, asked.reshape(4, steps, -1))
    layer = load_domains(("wikitext", "books"), ("wikitext",))
    index = LogitIndex.build(layer.weight, layer.bias, contexts=layer.learned, k=K, method="graph")
    sequences = np.load(data_folder() / "lm-softmax-50k" / "sequences_f16.npy")[:4, :steps].astype(np.float32)
    rows += measure_steps("50,000 words", index, sequences)
    table = Table(title="seeds of the steps before")
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.4f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=110).print(table)
    figures = []
    for row in rows:
        how = f"{row['contexts']}, {row['groups']} groups, {row['steps before']} steps before, list of {row['list']}"
        figures.append(Figure.of(f"P@10, {how}", row["P@10"], "share", "more"))
        figures.append(Figure.of(f"looked at, {how}", row["looked at"], "rows", "less"))
    if out is not None:
        Record(figures, scale=f"{4 * steps:,} steps each").write(out, rows=rows)


if __name__ == "__main__":
    main()
