"""SlotMap against numpy: the distinct ids of a batch, where each id is among them, and which slots hold them.

``python -m memhier.benchmarks.workloads.tiers.slot_map`` prints a table and, with ``--json``, writes it. All ways take
the same batches, one after the other within a round, and are charged process CPU time: neighbours disturb that least.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from memhier import backend
from memhier.benchmarks.bench.figures import Bar, Bars, Better, Figure, Record
from memhier.benchmarks.workloads.options import json_option
from memhier.cache.slots import SlotMap

__all__ = ["main", "measure"]

Ints = NDArray[np.int64]
Answer = tuple[Ints, Ints, Ints]


def measure(
    exponent: float, count: int, capacity: int, universe: int, rounds: int, seed: int
) -> dict[str, dict[str, float]]:
    """Return, for each way, CPU milliseconds per batch over all rounds: median, 10th and 90th percentile.

    Ids follow a Zipf law (uniform where `exponent` is 0) over `universe` ids in random order; the slots hold the most
    frequent ones.
    """
    draws, held = _batches(exponent, count, capacity, universe, seed)
    hashed = SlotMap(capacity, batch=count)
    direct = SlotMap(capacity, key_space=universe, batch=count)
    ordered = np.sort(held)
    slot_of_ordered = hashed.insert(held)[np.argsort(held)]
    direct.insert(held)
    ways: dict[str, Callable[[Ints], Answer]] = {
        "np.unique + searchsorted": lambda ids: _numpy_way(ids, ordered, slot_of_ordered),
        "SlotMap": hashed.unique_find,
        "SlotMap, key_space": direct.unique_find,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for ids in (next(draws) for _ in range(rounds)):
        answers = []
        for name, way in ways.items():
            started = time.process_time()
            answers.append(way(ids))
            seconds[name].append(time.process_time() - started)
        _check(ids, answers)
    return {
        name: {
            "median_ms": 1e3 * float(np.median(taken)),
            "p10_ms": 1e3 * float(np.percentile(taken, 10)),
            "p90_ms": 1e3 * float(np.percentile(taken, 90)),
        }
        for name, taken in seconds.items()
    }


def _batches(exponent: float, count: int, capacity: int, universe: int, seed: int) -> tuple[Iterator[Ints], Ints]:
    rng = np.random.default_rng(seed)
    id_of_rank = rng.permutation(universe)
    share = np.cumsum(np.arange(1, universe + 1) ** -exponent)

    def draw() -> Iterator[Ints]:
        while True:
            yield id_of_rank[np.searchsorted(share, rng.random(count) * share[-1])]

    return draw(), id_of_rank[:capacity]


def _numpy_way(ids: Ints, ordered: Ints, slots: Ints) -> Answer:
    unique, inverse = np.unique(ids, return_inverse=True)
    at = np.minimum(np.searchsorted(ordered, unique), len(ordered) - 1)
    return unique, inverse, np.where(ordered[at] == unique, slots[at], -1)


def _check(ids: Ints, answers: list[Answer]) -> None:
    """Hold every answer to the same slot for each id: a fast way that is wrong would be no news."""
    first = answers[0][2][answers[0][1]]
    for unique, inverse, slots in answers:
        if not (np.array_equal(unique[inverse], ids) and np.array_equal(slots[inverse], first)):
            raise AssertionError("the ways disagree")


def record(results: dict[str, dict[str, dict[str, float]]]) -> Record:
    """Return milliseconds a batch as figures and bars: median, 10th and 90th percentile."""
    figures, bars = [], []
    for law, ways in results.items():
        for name, taken in ways.items():
            spread = taken["median_ms"], taken["p10_ms"], taken["p90_ms"]
            better: Better = "neither" if name.startswith("np.") else "less"
            figures.append(Figure(f"{name}, {law} ids", spread[0], "ms of processor time", better, *spread[1:]))
            bars.append(Bar(f"{name}, {law}", *spread))
    return Record(figures, bars=[Bars("A batch of ids", "ms of processor time", bars)])


@click.command()
@click.option("--ids", "count", default=400_000, show_default=True, help="Ids in a batch.")
@click.option("--slots", "capacity", default=1_000_000, show_default=True)
@click.option("--universe", default=20_000_000, show_default=True, help="Ids there are.")
@click.option("--exponent", "exponents", multiple=True, default=(1.05, 0.0), show_default=True, help="Of the Zipf law.")
@click.option("--rounds", default=15, show_default=True)
@click.option("--seed", default=0, show_default=True)
@json_option
def main(
    count: int, capacity: int, universe: int, exponents: tuple[float, ...], rounds: int, seed: int, out: Path | None
) -> None:
    """Measure the lookup of a batch of ids, duplicates and all."""
    results = {
        f"zipf {exponent}" if exponent else "uniform": measure(exponent, count, capacity, universe, rounds, seed)
        for exponent in exponents
    }
    table = Table(title=f"{count:,} ids, {capacity:,} slots, {universe:,} possible ids; CPU ms, core: {backend.name}")
    for heading in ("ids", "way", "median", "p10", "times numpy"):
        table.add_column(heading, justify="left" if heading in ("ids", "way") else "right")
    for law, ways in results.items():
        numpy_ms = next(iter(ways.values()))["median_ms"]
        for name, taken in ways.items():
            median = taken["median_ms"]
            table.add_row(law, name, f"{median:.1f}", f"{taken['p10_ms']:.1f}", f"{numpy_ms / median:.1f}")
    Console().print(table)
    if out is not None:
        sizes = {"ids": count, "slots": capacity, "universe": universe, "rounds": rounds, "seed": seed}
        record(results).write(out, core=backend.name, sizes=sizes, results=results)


if __name__ == "__main__":
    main()
