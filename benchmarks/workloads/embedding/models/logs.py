"""Logs to train on: real ones, published files by path, and ids with the sizes and the skew of Criteo's, made."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from memhier.benchmarks.datasets import criteo_dac, data_set_folder, gowalla
from memhier.benchmarks.workloads.embedding.common import Sample, power_law, samples, table_sizes
from memhier.recsys import TiledNegatives, read_amazon, read_avazu, read_criteo, read_lightgcn, read_movielens

__all__ = ["LOGS", "Log", "LogOptions", "criteo_exponents", "fitted_exponent", "histories", "open_log"]

Kind = Literal["clicks", "pairs", "histories"]
EXPONENTS = (0.5, 3.0)
TILE = 4096


@dataclass(frozen=True, slots=True)
class LogOptions:
    """A log by name, with a file for the published ones; sizes of tables that are hashed or made; batches.

    Attributes
    ----------
    scale
        Of Criteo's large tables, and of the `rows` of others.
    rows
        Of each table of pairs, where the log does not say.
    length
        Items of a history.
    """

    name: str
    path: Path | None
    scale: float
    rows: int
    batch: int
    count: int
    length: int


@dataclass(frozen=True, slots=True)
class Log:
    """Batches of a log, and the number of rows of each table.

    Batches of ``"clicks"`` have numbers and labels; those of ``"pairs"`` a user and an item; those of ``"histories"``
    the ids that :class:`~memhier.benchmarks.workloads.embedding.models.sasrec.SASRec` takes.
    """

    kind: Kind
    sizes: list[int]
    batches: list[Sample]


def open_log(options: LogOptions, sequences: bool) -> Log:
    """Return the first batches of a log; `sequences` makes histories of pairs.

    Raises
    ------
    ValueError
        For an unknown name, a published log without a path, and a log that is too short.
    """
    if options.name not in LOGS:
        raise ValueError(f"name={options.name!r}: expected one of {', '.join(LOGS)}")
    if options.path is None and options.name in PUBLISHED:
        raise ValueError(f"path: expected the file of {options.name!r}")
    sizes, found = LOGS[options.name](options)
    kind: Kind = "clicks" if options.name in CLICKS else "pairs"
    if kind == "pairs" and sequences:
        kind, sizes = "histories", [sizes[1] + 1]
        found = histories((batch.ids for batch in found), sizes[0], options.length, options.batch)
    batches = [*islice((batch for batch in found if len(batch.ids) == options.batch), options.count)]
    if len(batches) < options.count:
        raise ValueError(f"log {options.name!r}: {len(batches)} batches of {options.batch}, expected {options.count}")
    return Log(kind, sizes, batches)


def histories(pairs: Iterable[Tensor], rows: int, length: int, batch: int) -> Iterator[Sample]:
    """Yield batches of histories: items, the next ones and random others side by side, int64 [n, 3 * length].

    The others come from a tile of items that stays for some batches, see :class:`~memhier.recsys.TiledNegatives`.
    Pairs of one user follow each other, with items from 0 on; item i becomes id i + 1, and 0 is padding. A history of
    more items is cut into several, one of a single item is left out.
    """
    rng = np.random.default_rng(0)
    tiles = TiledNegatives(rows=rows - 1, tile=min(TILE, rows - 1), steps=8)
    tile, done = 1 + tiles.at(0).numpy(), 0
    waiting: list[NDArray[np.int64]] = []

    def sample(items: list[int]) -> NDArray[np.int64]:
        row = np.zeros((3, length), np.int64)
        row[0, : len(items) - 1], row[1, : len(items) - 1] = items[:-1], items[1:]
        row[2, : len(items) - 1] = rng.choice(tile, len(items) - 1)
        return row.reshape(-1)

    user, items = -1, list[int]()
    for some in pairs:
        for mine, item in some.tolist():
            if mine != user or len(items) > length:
                if len(items) > 1:
                    waiting.append(sample(items))
                items = items[-1:] if mine == user else []
                user = mine
            items.append(item + 1)
            if len(waiting) == batch:
                yield _ids_alone(torch.from_numpy(np.stack(waiting)))
                waiting, done = [], done + 1
                tile = 1 + tiles.at(done).numpy()
    if len(items) > 1:
        waiting.append(sample(items))
    if waiting:
        yield _ids_alone(torch.from_numpy(np.stack(waiting)))


def fitted_exponent(distinct: int, draws: int, rows: int) -> float:
    """Return the exponent of `power_law` over `rows` ranks of which `draws` samples have so many distinct ones.

    The exponent lies between 0.5 and 3; expected numbers of distinct ranks fall as it grows, so halving finds it.
    """
    edges = np.unique(np.geomspace(1, rows + 1, 4000).astype(np.int64))
    widths = np.diff(edges)

    def expected(exponent: float) -> float:
        below = edges.astype(float) ** (1 - exponent)
        shares = np.diff(below) / (below[-1] - below[0]) / widths
        return float((widths * -np.expm1(draws * np.log1p(-np.minimum(shares, 1 - 1e-12)))).sum())

    low, high = EXPONENTS
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle) > distinct else (low, middle)
    return (low + high) / 2


def criteo_exponents() -> list[float]:
    """Return an exponent for each of Criteo's 26 tables, measured on the sample of its log.

    The sample does not name its columns: the table of the most rows gets the column of the most values, and so on.
    Tables whose rows nearly all occur in the sample tell no exponent; they get the median of the others.

    Raises
    ------
    FileNotFoundError
        When the sample is missing.
    """
    ids, _, sizes = criteo_dac()
    whole = np.array(table_sizes(1.0))
    exponents = np.full(len(whole), np.nan)
    columns = np.argsort(sizes)[::-1]
    for table, column in zip(np.argsort(-whole, kind="stable").tolist(), columns.tolist(), strict=False):
        distinct, draws = sizes[column] - 1, int((ids[:, column] > 0).sum())
        if distinct < 0.9 * whole[table]:
            exponents[table] = fitted_exponent(distinct, draws, int(whole[table]))
    found: list[float] = np.where(np.isnan(exponents), np.nanmedian(exponents), exponents).tolist()
    return found


def _criteo_sample(options: LogOptions) -> tuple[list[int], Iterator[Sample]]:
    ids, labels, sizes = criteo_dac()
    return sizes, _batches(options, torch.from_numpy(ids), torch.from_numpy(labels))


def _made(options: LogOptions) -> tuple[list[int], Iterator[Sample]]:
    sizes = table_sizes(options.scale)
    return sizes, samples(sizes, options.batch, options.count, 0, criteo_exponents())


def _made_pairs(options: LogOptions) -> tuple[list[int], Iterator[Sample]]:
    """Make users of as many items as a history holds, one after the other; items follow a power law."""
    rows = int(options.scale * options.rows)
    rng = np.random.default_rng(0)

    def batches() -> Iterator[Sample]:
        for number in range((options.length + 1) * options.count):
            users = (np.arange(options.batch) + number * options.batch) // (options.length + 1)
            items = power_law(rng.random(options.batch), rows, 1.05)
            yield _ids_alone(torch.from_numpy(np.stack([users % rows, items], 1)))

    return [rows, rows], batches()


def _gowalla(options: LogOptions) -> tuple[list[int], Iterator[Sample]]:
    pairs, users, items = gowalla()
    return [users, items], _batches(options, torch.from_numpy(pairs))


def _movielens_1m(options: LogOptions) -> tuple[list[int], Iterator[Sample]]:
    pairs = torch.cat([*read_lightgcn(data_set_folder("ml-1m") / "train.txt.xz")])
    users, items = (int(column.max()) + 1 for column in pairs.unbind(1))
    return [users, items], _batches(options, pairs)


def _clicks_of(read: Callable[..., Iterator[Any]], sizes: Callable[[LogOptions], list[int]]) -> "Opener":
    def opened(options: LogOptions) -> tuple[list[int], Iterator[Sample]]:
        rows = sizes(options)
        parts = read(options.path, rows, options.batch)
        padded = (Sample(part.ids, nn.functional.pad(part.dense, (0, 13 - part.dense.shape[1])), part.labels)
                  for part in parts)  # fmt: skip
        return rows, padded

    return opened


def _pairs_of(read: Callable[[LogOptions, list[int]], Iterator[Any]]) -> "Opener":
    def opened(options: LogOptions) -> tuple[list[int], Iterator[Sample]]:
        rows = [int(options.scale * options.rows)] * 2
        parts = read(options, rows)
        pairs = (part if isinstance(part, Tensor) else part[0] for part in parts)
        return rows, (_ids_alone(some % torch.tensor(rows)) for some in pairs)

    return opened


def _batches(options: LogOptions, ids: Tensor, labels: Tensor | None = None) -> Iterator[Sample]:
    """Yield batches of a log in memory, over and over."""
    while True:
        for start in range(0, len(ids), options.batch):
            cut = slice(start, start + options.batch)
            yield (
                _ids_alone(ids[cut])
                if labels is None
                else Sample(ids[cut], torch.zeros(len(ids[cut]), 13), labels[cut])
            )


def _ids_alone(ids: Tensor) -> Sample:
    return Sample(ids, torch.empty(len(ids), 0), torch.empty(len(ids)))


def _avazu_sizes(options: LogOptions) -> list[int]:
    return [int(options.scale * options.rows)] * 22


def _criteo_sizes(options: LogOptions) -> list[int]:
    return table_sizes(options.scale)


Opener = Callable[[LogOptions], tuple[list[int], Iterator[Sample]]]
LOGS: dict[str, Opener] = {
    "criteo-sample": _criteo_sample,
    "made-clicks": _made,
    "criteo": _clicks_of(read_criteo, _criteo_sizes),
    "avazu": _clicks_of(read_avazu, _avazu_sizes),
    "gowalla": _gowalla,
    "ml-1m": _movielens_1m,
    "made-pairs": _made_pairs,
    "movielens": _pairs_of(lambda options, rows: read_movielens(options.path or "", options.batch)),
    "amazon": _pairs_of(lambda options, rows: read_amazon(options.path or "", rows, options.batch)),
    "lightgcn": _pairs_of(lambda options, rows: read_lightgcn(options.path or "", options.batch)),
}
CLICKS: Sequence[str] = ("criteo-sample", "made-clicks", "criteo", "avazu")
PUBLISHED: Sequence[str] = ("criteo", "avazu", "movielens", "amazon", "lightgcn")
