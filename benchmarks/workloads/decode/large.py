"""A vocabulary of a million rows by 1,024 of which a tenth fits in DRAM: milliseconds a token, batch 1.

``python -m memhier.benchmarks.workloads.decode.large --dir /path/on/the/device`` measures it.

A word of this vocabulary is a pair: a word of a trained layer (512 dimensions, 50,000 words) after another one. With
hidden states of two steps side by side, the logit of a pair is the sum of both words' logits. So contexts are real, and
rows have the structure of a trained layer.
"""

import time
from pathlib import Path
from typing import Any, TypeAlias

import click
import numpy as np
import numpy.typing as npt

from memhier.ann.decoder import LogitIndex
from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.datasets import data_set_folder
from memhier.benchmarks.decode.clock import OtherWork
from memhier.benchmarks.decode.layers import load_domains
from memhier.benchmarks.peers.account import PeakMemory, memory_now
from memhier.benchmarks.workloads.harness import Measure, Outcome, Row, bars_of, figures_of, rows_table, workload

__all__ = ["main"]

K = 10
_SHARE = 0.5  # of the earlier word's logit
_BLOCK = 50_000

Floats: TypeAlias = npt.NDArray[np.float32]


def make_pairs(words: int, before: int, file: Path) -> tuple[Floats, Floats]:
    """Return the rows, in a file, and biases of all pairs of the most frequent words."""
    layer = load_domains(("wikitext",), ("wikitext",))
    rows = np.lib.format.open_memmap(file, "w+", np.float32, (words * before, 1024))
    later, earlier = layer.weight[:words], _SHARE * layer.weight[:before]
    step = max(1, _BLOCK // before)
    for start in range(0, words, step):
        block = later[start : start + step]
        rows[start * before : (start + len(block)) * before, :512] = np.repeat(block, before, axis=0)
        rows[start * before : (start + len(block)) * before, 512:] = np.tile(earlier, (len(block), 1))
    rows.flush()
    bias = (layer.bias[:words, None] + _SHARE * layer.bias[None, :before]).reshape(-1)
    return rows, np.ascontiguousarray(bias)


def contexts() -> tuple[Floats, Floats]:
    """Return hidden states of two steps side by side: those of six sequences to learn from, of two to be answered."""
    sequences = np.load(data_set_folder("lm-softmax-50k") / "sequences_f16.npy").astype(np.float32)
    pairs = np.concatenate([sequences[:, 1:], sequences[:, :-1]], axis=2)
    return pairs[:6].reshape(-1, 1024), np.ascontiguousarray(pairs[6:].reshape(-1, 1024))


def truth_of(words: int, before: int, asked: Floats) -> npt.NDArray[np.float64]:
    """Return the K-th largest logit of each context: a pair's logit is the sum of two."""
    layer = load_domains(("wikitext",), ("wikitext",))
    later = asked[:, :512].astype(np.float64) @ layer.weight[:words].T + layer.bias[:words]
    earlier = _SHARE * (asked[:, 512:].astype(np.float64) @ layer.weight[:before].T + layer.bias[:before])
    # The K largest sums are among sums of the K largest of each.
    best = (np.sort(later, 1)[:, -K:, None] + np.sort(earlier, 1)[:, None, -K:]).reshape(len(asked), -1)
    found: npt.NDArray[np.float64] = np.sort(best, 1)[:, -K]
    return found


def ask_all(index: LogitIndex, asked: Floats, kth: npt.NDArray[np.float64], method: Any) -> Row:
    """Ask one context after the other, with a model's work between, and return times, precision and reads."""
    index.topk(asked[:1], method=method)
    before, taken, right, other = index.stats(), [], [], OtherWork()
    for state, least in zip(asked, kth, strict=True):
        other()
        started = time.perf_counter()
        found = index.topk(state[None], method=method)
        taken.append(1e3 * (time.perf_counter() - started))
        right.append((found.values[0] >= least - 1e-3).mean())
    return {
        "method": method, "median_ms": float(np.median(taken)), "p95_ms": float(np.percentile(taken, 95)),
        "precision": float(np.mean(right)), "pages": (index.stats()["pages"] - before["pages"]) / len(asked),
    }  # fmt: skip


@workload
@click.option("--words", default=10_000, show_default=True, help="Words, each after each of --before others.")
@click.option("--before", default=100, show_default=True)
@click.option("--rank", default=128, show_default=True, help="Directions that are coded.")
@click.option("--queries", default=400, show_default=True)
def main(scratch: Path, words: int, before: int, rank: int, queries: int) -> Outcome:
    """Decode from a vocabulary whose rows lie on SSD."""
    learned, asked = contexts()
    asked = asked[:queries]
    kth = truth_of(words, before, asked)
    count = words * before
    weight, bias = make_pairs(words, before, scratch / "weight.npy")
    dram = count * 4096 // 10
    started, base = time.perf_counter(), memory_now()
    with PeakMemory() as peak:
        index = LogitIndex.build(
            weight, bias, contexts=learned, k=K, method="graph", rank=rank, dram=dram, path=scratch / "index"
        )
    build_s, built = time.perf_counter() - started, peak.private_bytes - base
    del weight
    rows = [ask_all(index, asked, kth, method) for method in ("graph", "preview")]
    held = index.memory_bytes
    index.close()
    figures = [
        Figure.of("DRAM held, of the rows", held / (count * 4096), "share", "less"),
        Figure.of("DRAM at build, of the rows", built / (count * 4096), "share", "less"),
        *figures_of(rows, [Measure("median_ms", "a token", "ms", clock=True)], "{title}, {method}, batch 1"),
        *figures_of(rows, [Measure("p95_ms", "95th percentile", "ms", clock=True)], "{title}, {method}, batch 1"),
        *figures_of(rows, [Measure("precision", "P@10", "share", "more")], "{title}, {method}"),
    ]
    bars = [bars_of("a token from rows on SSD, batch 1", "ms", {row["method"]: row["median_ms"] for row in rows})]
    shown = [rows_table(f"{count:,} rows x 1,024, {held / 2**20:.0f} MiB in DRAM, built in {build_s:.0f} s", rows)]
    return Outcome(Record(figures, bars=bars), shown, {"rows": rows, "build_s": build_s, "count": count})


if __name__ == "__main__":
    main()
