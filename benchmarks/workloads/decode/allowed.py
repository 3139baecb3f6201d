"""The ten largest logits among allowed words, against the full product with a mask, on a trained layer.

``python -m memhier.benchmarks.workloads.decode.allowed`` runs on one thread and prints medians of rounds by turns, each
after 48 MB of other memory were touched, and warm. Words are allowed as a grammar does it: by bits that come with each
call. The sets are drawn at random; the precision counts how many of the ten largest allowed words are found.
"""

from functools import partial
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor, nn

from memhier.ann.decoder import LogitIndex
from memhier.benchmarks.bench.figures import Record
from memhier.benchmarks.workloads.decode.clock import Floats, Ints, Way, measure, precision
from memhier.benchmarks.workloads.decode.curve import COLD, DOMAINS, PRECISION, WARM
from memhier.benchmarks.workloads.decode.layers import TrainedLayer, load_domains
from memhier.benchmarks.workloads.harness import Outcome, figures_of, rows_table, workload

__all__ = ["main"]

K = 10


def bits_of(ids: Ints, words: int) -> Any:
    """Return ids as bits, int32 ``[ceil(V / 32)]``."""
    mask = np.zeros(-(-words // 32) * 32, np.bool_)
    mask[ids] = True
    return np.packbits(mask, bitorder="little").view(np.int32)


def masked_products(layer: TrainedLayer, ids: Ints) -> list[Way]:
    """Return the full product with a mask in float32 and bfloat16."""
    weight, bias = torch.from_numpy(layer.weight), torch.from_numpy(layer.bias)
    closed = torch.ones(len(weight), dtype=torch.bool)
    closed[torch.from_numpy(ids)] = False

    def answer(states: Floats, weight: Tensor, bias: Tensor) -> Ints:
        logits = nn.functional.linear(torch.from_numpy(states).to(weight.dtype), weight, bias)
        return torch.topk(logits.masked_fill_(closed, -torch.inf), K).indices.numpy()

    return [
        Way("full", "fp32", partial(answer, weight=weight, bias=bias)),
        Way("full", "bf16", partial(answer, weight=weight.bfloat16(), bias=bias.bfloat16())),
    ]


def ways_of_memhier(index: LogitIndex, ids: Ints, words: int) -> list[Way]:
    """Return the decoder's ways: by bits, by ids, and proven."""
    bits = bits_of(ids, words)
    return [
        Way("bits", "", lambda states: index.topk(states, allowed=bits).indices),
        Way("ids", "", lambda states: index.topk(states, allowed=ids).indices),
        Way("proven", "", lambda states: index.topk(states, allowed=bits, certify=True).indices),
    ]


def compared(layer: TrainedLayer, index: LogitIndex, size: int, batch: int, rounds: int) -> list[dict[str, Any]]:
    """Measure one size of the allowed set."""
    words = len(layer.weight)
    ids = np.sort(np.random.default_rng(size).permutation(words)[:size])
    among = layer.asked.astype(np.float64) @ layer.weight[ids].T + layer.bias[ids]
    truth = ids[np.argsort(-among, 1)[:, :K]]
    ways = ways_of_memhier(index, ids, words)
    cold, warm = measure([*masked_products(layer, ids), *ways], layer.asked, batch, rounds).medians()
    over = [
        (f"over_{base}{end}", f"full, {base}", times) for base in COLD for end, times in (("", cold), ("_warm", warm))
    ]
    return [
        {"allowed": size, "batch": batch, "way": way.name, "precision": precision(way.answer(layer.asked), truth)}
        | {"ms": cold[way.name], "ms_warm": warm[way.name]}
        | {name: times[full] / times[way.name] for name, full, times in over}
        for way in ways
    ]


@workload
@click.option("--words", type=int, help="Only the most frequent words of the layer; all 50,000 by default.")
@click.option("--rounds", default=60, show_default=True)
@click.option("--allowed", "sizes", multiple=True, type=int, default=(20, 200, 2000, 20_000, 40_000), show_default=True)
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8, 64), show_default=True)
@torch.no_grad()
def main(words: int | None, rounds: int, sizes: tuple[int, ...], batches: tuple[int, ...]) -> Outcome:
    """Compare the ways to the ten largest logits among allowed words."""
    layer = load_domains(DOMAINS, DOMAINS, words)
    index = LogitIndex.build(layer.weight, layer.bias, contexts=layer.learned, k=K)
    rows = [
        row
        for batch in batches
        for size in sizes
        if size <= len(layer.weight)
        for row in compared(layer, index, size, batch, max(5, rounds // batch))
    ]
    how = "{title}, {allowed:,} allowed, batch {batch}, {way}"
    figures = [
        *figures_of(rows, [PRECISION], how),
        *figures_of(rows, [*COLD.values()], how + ", cold"),
        *figures_of(rows, [*WARM.values()], how + ", warm"),
    ]
    scale = f"{len(layer.weight):,} words, one thread of a CPU"
    return Outcome(Record(figures, scale=scale), [rows_table("among allowed words", rows)], {"ways": rows})


if __name__ == "__main__":
    main()
