"""Retrieval of 20 to 1,000 items for users: recall against the full product, time, and DRAM.

``python -m memhier.benchmarks.workloads.decode.items`` trains a factorisation with biases of items (BPR) on Gowalla's
visits, with torch and from a seed. Items are the rows of an output layer, users its contexts; half of the users are
learned from, of the others some ask. For each K a decoder is built for that K, and asked by every method of its own;
ZoomIndex keeps the rows, with the bias as one more dimension, on SSD; FGD is faiss's HNSW over the transformed rows.
Times are processor time of the process, one user at a time, every way by turns, after 48 MB of other memory were
touched, as by a model between two calls.
"""

import lzma
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import click
import numpy as np
import torch
from torch import Tensor, nn

from memhier.ann import ZoomIndex
from memhier.ann.decoder import FGD, LogitIndex
from memhier.benchmarks.bench.figures import Curves, Record, Series
from memhier.benchmarks.datasets import data_set_folder, gowalla
from memhier.benchmarks.workloads.decode.clock import Floats, Ints, OtherWork, precision
from memhier.benchmarks.workloads.decode.layers import TrainedLayer
from memhier.benchmarks.workloads.harness import (
    Measure,
    Outcome,
    Row,
    by_turns,
    figures_of,
    grouped,
    rows_table,
    workload,
)
from memhier.io.outside import reading

__all__ = ["main"]

Method: TypeAlias = Any
BATCH = 4096
ASKED = 1000
RATE, DECAY = 5e-3, 1e-4
BASE = "full, fp32"
MEASURES = [
    Measure("recall", "recall", "share", "more"),
    Measure("ms", "time of a user", "ms", "less", clock=True),
    Measure("over_fp32", "speed-up over fp32", "times", "more", clock=True),
    Measure("MiB", "DRAM beside the layer", "MiB", "less"),
]


@dataclass(frozen=True, slots=True)
class Visits:
    """Pairs of user and item, int64 ``[n, 2]`` each, to learn from and held out, and the counts of both."""

    train: Ints
    held_out: Ints
    users: int
    items: int


def load_visits() -> Visits:
    """Return Gowalla's visits.

    Raises
    ------
    FileNotFoundError
        When the data set is missing.
    """
    pairs, users, items = gowalla()
    path = data_set_folder("gowalla") / "test.txt.xz"
    with reading(path, "lines of numbers"):
        lines = [[int(part) for part in line.split()] for line in lzma.decompress(path.read_bytes()).splitlines()]
    held_out = np.array([(line[0], item) for line in lines for item in line[1:]], np.int64)
    return Visits(pairs, held_out, users, items)


def generated_visits(users: int, items: int, seed: int = 0) -> Visits:
    """Return visits of users to items near them in a plane, popular ones more often."""
    random = np.random.default_rng(seed)
    homes, places = random.normal(size=(users, 2)), random.normal(size=(items, 2))
    popular = random.permutation(-np.log(np.arange(1, items + 1)))
    near = popular - 4 * np.square(homes[:, None] - places[None]).sum(2)
    drawn = np.argsort(-(near + random.gumbel(size=near.shape)), 1)[:, :24]
    pairs = np.stack([np.repeat(np.arange(users), 24), drawn.reshape(-1)], 1).reshape(users, 24, 2)
    return Visits(pairs[:, :20].reshape(-1, 2), pairs[:, 20:].reshape(-1, 2), users, items)


class Factors(nn.Module):
    """Users and items as vectors, and a bias of each item."""

    def __init__(self, visits: Visits, width: int) -> None:
        super().__init__()
        self.user: nn.Embedding = nn.Embedding(visits.users, width, sparse=True)
        self.item: nn.Embedding = nn.Embedding(visits.items, width + 1, sparse=True)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return how much users like items, and add the squares of all numbers used for each, ``[2, n]``."""
        user, item = self.user(users), self.item(items)
        return torch.stack([(user * item[:, :-1]).sum(1) + item[:, -1], user.square().sum(1) + item.square().sum(1)])


@torch.enable_grad()
def learn(visits: Visits, width: int, epochs: int, seed: int = 0) -> Factors:
    """Train by Bayesian personalised ranking (Rendle et al. 2009): a visited item goes before one drawn evenly."""
    torch.manual_seed(seed)
    model = Factors(visits, width)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=RATE)
    pairs = torch.from_numpy(visits.train)
    for _ in range(epochs):
        for rows in torch.randperm(len(pairs)).split(BATCH):  # type: ignore[no-untyped-call]
            users, items = pairs[rows].unbind(1)
            liked, squares = model(users, items)
            other, more = model(users, torch.randint(visits.items, items.shape))
            loss = -nn.functional.logsigmoid(liked - other).sum() + DECAY * (squares + more).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # type: ignore[no-untyped-call]
    return model


@torch.no_grad()
def ranked_well(model: Factors, visits: Visits, seed: int = 1) -> float:
    """Return the share of held-out visits that go before an item drawn evenly."""
    users, items = torch.from_numpy(visits.held_out).unbind(1)
    random = torch.Generator().manual_seed(seed)
    others = torch.randint(visits.items, items.shape, generator=random)
    return float((model(users, items)[0] > model(users, others)[0]).double().mean())


def layer_of(model: Factors, seed: int = 0) -> TrainedLayer:
    """Return items as rows, half of the users to learn from, and some of the others to ask."""
    users, items = model.user.weight.detach().numpy(), model.item.weight.detach().numpy()
    order = np.random.default_rng(seed).permutation(len(users))
    half = len(users) // 2
    return TrainedLayer(
        np.ascontiguousarray(items[:, :-1]), items[:, -1].copy(), users[order[:half]], users[order[half:][:ASKED]]
    )


@dataclass(frozen=True, slots=True)
class Way:
    """One way to the K largest: maps users ``[n, D]`` and K to items ``[n, K]``; all DRAM held, and build time."""

    name: str
    answer: Callable[[Floats, int], Ints]
    memory: int
    build_s: float = 0.0


def full_products(layer: TrainedLayer) -> Iterator[Way]:
    """Yield the full product in float32 and bfloat16."""
    for name, dtype in ((BASE, torch.float32), ("full, bf16", torch.bfloat16)):
        weight, bias = torch.from_numpy(layer.weight).to(dtype), torch.from_numpy(layer.bias).to(dtype)

        def answer(users: Floats, k: int, weight: Tensor = weight, bias: Tensor = bias) -> Ints:
            logits = nn.functional.linear(torch.from_numpy(users).to(weight.dtype), weight, bias)
            return torch.topk(logits, k).indices.numpy()

        yield Way(name, answer, weight.nbytes + bias.nbytes)


def decoders(layer: TrainedLayer, k: int) -> Iterator[Way]:
    """Yield every method of a decoder that is built for K."""
    started = time.process_time()
    index = LogitIndex.build(layer.weight, layer.bias, contexts=layer.learned, k=k)
    seconds = time.process_time() - started
    held = layer.weight.nbytes + layer.bias.nbytes + index.memory_bytes

    def by(method: Method) -> Callable[[Floats, int], Ints]:
        return lambda users, wanted: index.topk(users, wanted, method=method).indices

    for name, method in (("auto", None), ("graph", "graph"), ("screen", "screen"), ("preview", "preview")):
        yield Way(f"decoder, {name}", by(method), held, seconds)
    yield Way(
        "decoder, certified",
        lambda users, wanted: index.topk(users, wanted, certify=True, complete=True).indices, held, seconds,
    )  # fmt: skip


def zoom_index(layer: TrainedLayer, path: Path, dram: str) -> Way:
    """Return an index of the items for inner products, with their biases as one more dimension, and rows on SSD."""
    started = time.process_time()
    index = ZoomIndex.build(
        path, np.concatenate([layer.weight, layer.bias[:, None]], 1), metric="ip", dram=dram
    )  # fmt: skip
    index.tune(_with_one(layer.learned[:2000]))
    seconds = time.process_time() - started
    planned = int(index.stats()["planned_bytes"])
    return Way(
        "ZoomIndex, recall 0.99", lambda users, k: np.asarray(index.search(_with_one(users), k).ids), planned, seconds
    )


def graphs_of_faiss(layer: TrainedLayer) -> Iterator[Way]:
    """Yield FGD, faiss's HNSW over the transformed rows, at three efforts."""
    started = time.process_time()
    graph = FGD(layer.weight, layer.bias)
    seconds = time.process_time() - started
    held = layer.weight.nbytes + layer.bias.nbytes + graph.memory_bytes

    def walk(users: Floats, k: int, times: int) -> Ints:
        return graph.topk(users, k, ef_search=times * max(k, 50)).indices

    for times in (1, 2, 4):
        yield Way(f"FGD on faiss HNSW, efSearch {times} K", partial(walk, times=times), held, seconds)


def _with_one(users: Floats) -> Floats:
    """Return users with the factor of the bias."""
    return np.concatenate([users, np.ones((len(users), 1), np.float32)], 1)


def measure(layer: TrainedLayer, ways: list[Way], k: int, rounds: int) -> list[Row]:
    """Return recall, and medians of processor time, of every way."""
    logits = layer.asked.astype(np.float64) @ layer.weight.T + layer.bias
    truth = np.argpartition(-logits, k - 1, 1)[:, :k]
    other, turns = OtherWork(), iter(range(len(ways) * rounds))

    def ask(way: Way) -> float:
        at = next(turns) // len(ways) % len(layer.asked)
        user = layer.asked[at : at + 1].copy()
        other()
        started = time.process_time()
        way.answer(user, k)
        return 1e3 * (time.process_time() - started)

    found = {way.name: precision(way.answer(layer.asked, k), truth) for way in ways}
    taken = by_turns({way.name: partial(ask, way) for way in ways}, rounds)
    ms = {name: float(np.median(each)) for name, each in taken.items()}
    return [
        {"way": way.name, "k": k, "recall": found[way.name], "ms": ms[way.name], "over_fp32": ms[BASE] / ms[way.name],
         "MiB": way.memory / 2**20, "build_s": way.build_s}
        for way in ways
    ]  # fmt: skip


def record(rows: list[Row], visits: Visits, width: int) -> Record:
    """Return figures, and a curve for each K."""
    curves = []
    for (k,), some in grouped(rows, "k").items():
        lines = [Series(row["way"], [(row["over_fp32"], row["recall"])]) for row in some]
        title = f"the {k:,} best of {visits.items:,} items x {width}, one user, after other work"
        curves.append(Curves(title, "times faster than fp32", "recall", lines, log_x=True))
    return Record(
        figures_of(rows, MEASURES, "{title}, {way}, K {k}"),
        curves,
        scale=f"{visits.items:,} items, one thread of a CPU",
    )


@workload
@click.option("--generated", "made", type=click.IntRange(500), help="So many made users, and as many items, instead.")
@click.option("--k", "ks", type=click.IntRange(1), multiple=True, default=(20, 100, 1000), show_default=True)
@click.option("--width", type=click.IntRange(4), default=64, show_default=True)
@click.option("--epochs", type=click.IntRange(1), default=15, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=200, show_default=True)
@click.option("--dram", default="8MiB", show_default=True, help="The budget of ZoomIndex.")
@torch.no_grad()
def main(
    made: int | None, ks: tuple[int, ...], width: int, epochs: int, rounds: int, dram: str, scratch: Path
) -> Outcome:
    """Compare ways to the best items."""
    visits = generated_visits(made, made) if made else load_visits()
    started = time.process_time()
    model = learn(visits, width, epochs)
    seconds = time.process_time() - started
    told = (
        f"{visits.users:,} users, {visits.items:,} items x {width}, {epochs} epochs in {seconds:.0f} s "
        f"of processor time; {ranked_well(model, visits):.3f} of the held-out visits go before another item"
    )
    layer = layer_of(model)
    shared = [*full_products(layer), zoom_index(layer, scratch / "items", dram), *graphs_of_faiss(layer)]
    rows = [row for k in ks for row in measure(layer, [*shared, *decoders(layer, k)], k, rounds)]
    return Outcome(record(rows, visits, width), [told, rows_table("one user at a time", rows)], {"rows": rows})


if __name__ == "__main__":
    main()
