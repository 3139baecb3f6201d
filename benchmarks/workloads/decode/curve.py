"""Precision against speed-up of every way to the ten largest logits of a trained layer, on real hidden states.

``python -m memhier.benchmarks.workloads.decode.curve`` runs on one thread and prints medians of rounds that take turns.
Each way is called after 48 MB of other memory were touched, as a model does between two words, and warm. The layer has
50,000 words, 512 dimensions and contexts of two domains. Beside single queries the program measures batches of up to
256, and contexts of a domain that calibration did not see. Indexes of faiss are kept for the next run.
"""

import time
from dataclasses import replace
from typing import Any

import click
import numpy as np
import torch

from memhier.ann.decoder import LogitIndex, TopKSoftmax
from memhier.benchmarks.bench.figures import Curves, Record, Series
from memhier.benchmarks.workloads.decode.clock import Floats, Ints, Way, measure, precision
from memhier.benchmarks.workloads.decode.layers import TrainedLayer, load_domains
from memhier.benchmarks.workloads.decode.rivals import approximations, full_products, graphs_of_faiss
from memhier.benchmarks.workloads.harness import Measure, Outcome, Row, figures_of, rows_table, workload

__all__ = ["main"]

DOMAINS = ("wikitext", "books")
K = 10
_FEW_WORDS = 1000


COLD = {base: Measure(f"over_{base}", f"over {base}", "times", "more", clock=True) for base in ("fp32", "bf16")}
WARM = {base: Measure(f"over_{base}_warm", f"over {base}", "times", "more", clock=True) for base in ("fp32", "bf16")}
PRECISION = Measure("precision", "P@10", "share", "more")


def ways_of_memhier(layer: TrainedLayer, precisions: tuple[float, ...]) -> list[Way]:
    """Build the decoder for several declared precisions, and return its ways."""
    ways = []
    for declared in precisions:
        started = time.perf_counter()
        index = LogitIndex.build(
            layer.weight, layer.bias, contexts=layer.learned, k=K, precision=declared, method="graph"
        )
        seconds = time.perf_counter() - started
        ways += [
            Way(method, f"declared {declared}", _answers(index, method), index.memory_bytes, seconds)
            for method in ("graph", "screen")
        ]
    ways.append(Way("preview", "", _answers(index, "preview"), index.memory_bytes, seconds))
    ways.append(Way("proven", "", lambda states: index.topk(states, certify=True).indices, index.memory_bytes, seconds))
    return ways


def _answers(index: LogitIndex, method: Any) -> Any:
    return lambda states: index.topk(states, method=method).indices


def truth_of(layer: TrainedLayer) -> Ints:
    """Return the words of the ten largest logits, in double precision."""
    found = [
        np.argsort(-(states.astype(np.float64) @ layer.weight.T + layer.bias), 1)[:, :K]
        for states in np.array_split(layer.asked, 16)
    ]
    return np.concatenate(found)


def batches_of(layer: TrainedLayer, rounds: int, batches: tuple[int, ...]) -> list[dict[str, Any]]:
    """Measure the full products, ``method="auto"``, and proven answers, by size of batch."""
    full = list(full_products(layer))[:2]
    head = torch.nn.Linear(*layer.weight.shape[::-1])
    head.weight.data, head.bias.data = torch.from_numpy(layer.weight), torch.from_numpy(layer.bias)
    decoder = TopKSoftmax.from_linear(head, k=K, contexts=torch.from_numpy(layer.learned))
    auto = Way("auto", "", lambda states: decoder.topk(torch.from_numpy(states))[1].numpy())
    _begin(auto, layer.asked)
    certified = Way("certified", "", lambda states: decoder.certified_topk(torch.from_numpy(states))[1].numpy())
    rows = []
    for batch in batches:
        cold, warm = measure([*full, auto, certified], layer.asked, batch, rounds).medians()
        for way in (auto, certified):
            ours = {"words": len(layer.weight), "batch": batch, "way": way.name, "takes": decoder.index.way(batch)}
            rows.append(ours | {"ms": cold[way.name]} | _over(cold, warm, way.name))
    return rows


def _begin(way: Way, asked: Floats) -> None:
    """Make the first calls, which also compare their answers with the preview's."""
    for state in asked[:64]:
        way.answer(state[None])


def _over(cold: dict[str, float], warm: dict[str, float], name: str) -> dict[str, float]:
    """Return how many times faster than the full products a way is, cold first."""
    return {
        f"over_{base}{how}": taken[f"full, {base}"] / taken[name]
        for how, taken in (("", cold), ("_warm", warm))
        for base in ("fp32", "bf16")
        if f"full, {base}" in taken
    }


def first_words(layer: TrainedLayer, words: int) -> TrainedLayer:
    """Return the layer of its most frequent words alone."""
    return TrainedLayer(layer.weight[:words], layer.bias[:words], layer.learned, layer.asked)


def unseen_domains(rounds: int, words: int | None) -> list[dict[str, Any]]:
    """Learn from one domain, ask contexts of the other."""
    rows = []
    for seen, asked in (DOMAINS, DOMAINS[::-1]):
        layer = load_domains((seen,), (asked,), words)
        truth = truth_of(layer)
        ways = ways_of_memhier(layer, (0.99,))
        _begin(ways[0], layer.asked)
        cold, warm = measure([next(full_products(layer)), *ways], layer.asked, 1, rounds).medians()
        for way in ways:
            found: dict[str, Any] = {"precision": precision(way.answer(layer.asked), truth), "ms": cold[way.name]}
            rows.append({"learned": seen, "asked": asked, "way": way.name} | found | _over(cold, warm, way.name))
    return rows


def record(rows: list[Row], batches: list[Row], unseen: list[Row], words: int) -> Record:
    """Return figures and the curve."""
    published = [row for row in rows if row["way"] == "graph, declared 0.99"]
    others = [row for row in rows if row not in published]
    paper = replace(COLD["fp32"], paper="FGD")
    how = "{way}, learned on {learned}, asked {asked}"
    figures = [
        *figures_of(rows, [PRECISION], "{title}, {way}"),
        *figures_of(published, [paper], "speed-up {title}, {way}, cold"),
        *figures_of(others, [COLD["fp32"]], "speed-up {title}, {way}, cold"),
        *figures_of(rows, [WARM["fp32"]], "speed-up {title}, {way}, warm"),
        *figures_of(batches, [*COLD.values()], "{way} {title}, {words:,} words, batch {batch}, cold"),
        *figures_of(batches, [*WARM.values()], "{way} {title}, {words:,} words, batch {batch}, warm"),
        *figures_of(unseen, [PRECISION], "{title}, " + how),
        *figures_of(unseen, [COLD["fp32"]], "speed-up {title}, " + how + ", cold"),
    ]
    families: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        families.setdefault(row["way"].split(",")[0], []).append((row["over_fp32"], row["precision"]))
    lines = [Series(name, sorted(points)) for name, points in families.items()]
    title = f"the ten largest logits, {words:,} words x 512, batch 1, after other work"
    curve = Curves(title, "times faster than fp32", "precision@10", lines, log_x=True)
    return Record(figures, [curve], scale=f"{words:,} words, one thread of a CPU")


@workload
@click.option("--words", type=int, help="Only the most frequent words of the layer; all 50,000 by default.")
@click.option("--rounds", default=300, show_default=True)
@click.option(
    "--peers/--no-peers", default=True, show_default=True, help="Other approximations; they take minutes to build."
)
@click.option("--construction", default=200, show_default=True, help="efConstruction of faiss's graphs.")
@torch.no_grad()
def main(words: int | None, rounds: int, peers: bool, construction: int) -> Outcome:
    """Compare the ways to the ten largest logits."""
    layer = load_domains(DOMAINS, DOMAINS, words)
    truth = truth_of(layer)
    ways = [*full_products(layer), *ways_of_memhier(layer, (0.99, 0.97, 0.999))]
    if peers:
        ways += [*approximations(layer), *graphs_of_faiss(layer, construction)]
    found = {
        way.name: precision(np.concatenate([way.answer(one[None]) for one in layer.asked[:256]]), truth[:256])
        for way in ways
    }
    cold, warm = measure(ways, layer.asked, 1, rounds).medians()
    rows = [
        {"way": way.name, "precision": found[way.name], "ms": cold[way.name], "ms_warm": warm[way.name]}
        | _over(cold, warm, way.name)
        | {"MiB": way.memory / 2**20, "build_s": way.build_s}
        for way in ways
    ]
    batches = batches_of(layer, max(5, rounds // 12), (1, 8, 64, 256))
    # Where the layer is small, the full product takes over at some size of batch.
    batches += batches_of(first_words(layer, _FEW_WORDS), max(15, rounds // 6), (1, 2, 4, 8, 16, 32, 64, 128, 256))
    unseen = unseen_domains(rounds // 2, words)
    shown = [
        rows_table("batch 1, cold: after other work; and warm", rows),
        rows_table("batches, method auto and certified", batches),
        rows_table("contexts of a domain that calibration did not see", unseen),
    ]
    details = {"ways": rows, "batches": batches, "unseen": unseen}
    return Outcome(record(rows, batches, unseen, len(layer.weight)), shown, details)


if __name__ == "__main__":
    main()
