"""The DRAM ceiling: CPU of a single query at equal recall, beside libraries that hold everything in DRAM.

``python -m memhier.benchmarks.workloads.search.ceiling`` asks hnswlib, faiss's IVF PQ fast-scan with refine, a
`ZoomIndex` with a sixth of the raw bytes (``--share``), cold, and one with DRAM for everything. All settings take
turns, with one thread and one query a call. Of each, the table has the cheapest setting that reaches a recall.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import process_time
from typing import Any

import click
import numpy as np

from memhier.ann import ZoomIndex
from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.exact import id_recall
from memhier.benchmarks.peers import faiss_refine, hnswlib, memhier
from memhier.benchmarks.peers.base import Effort, Matrix
from memhier.benchmarks.workloads.harness import Measure, Outcome, Row, by_turns, figures_of, rows_table, skip, workload
from memhier.benchmarks.workloads.search.recall import READS, Ask
from memhier.benchmarks.workloads.search.sets import FAMILIES, SearchCase

__all__ = ["main"]

K = 10
_ROUNDS = 5
_COLD, _HELD = "memhier, cold", "memhier, all in DRAM"
_ALL, _BUFFERS = 1.7, 4 << 20  # DRAM for everything: of the raw bytes, and beside them
_HNSWLIB, _REFINE = "hnswlib", "faiss fast-scan, codes of {}"
_CODE_BYTES = (16, 32)
_SCANS: tuple[Effort, ...] = tuple(
    {"nprobe": nprobe, "k_factor": factor} for factor in (4, 16, 64) for nprobe in (8, 16, 32, 64, 128, 256, 512)
)
_WALKS: tuple[Effort, ...] = tuple({"ef": ef} for ef in (20, 40, 80, 160, 320, 640, 1280))
_COLUMNS = ("data", "target", "way", "effort", "recall", "cpu_ms", "reads", "dram_share")
MEASURES = (
    Measure("recall", "recall@10", "share", "neither"),
    Measure("cpu_ms", "CPU", "ms a query"),
    Measure("reads", "reads", READS),
    Measure("dram_share", "DRAM", "of the raw bytes"),
)


@dataclass(frozen=True, slots=True)
class Way:
    """An open index with its efforts.

    Attributes
    ----------
    ask
        Takes queries ``[q, d]`` and an effort; returns the ids found for one query.
    pages
        Returns the pages read so far.
    dram
        Bytes of DRAM held.
    """

    efforts: Sequence[Effort]
    ask: Callable[[Matrix, Effort], Matrix]
    pages: Callable[[], int]
    dram: int


def open_ways(case: SearchCase, share: float, scratch: Path) -> dict[str, Way]:
    """Build and open all indexes that can be had here, the cold one with a `share` of the raw bytes."""
    raw = case.base.nbytes
    ways = {
        _COLD: _memhier(case, scratch / _COLD, int(share * raw), held=False),
        _HELD: _memhier(case, scratch / _HELD, int(_ALL * raw) + _BUFFERS, held=True),
    }
    for size in _CODE_BYTES:
        folder = scratch / f"faiss-{size}"
        ways[_REFINE.format(size)] = _in_dram(faiss_refine.Peer(), case, folder, _SCANS, code_bytes=size)
    if find_spec("hnswlib") is None:
        skip("hnswlib is not installed")
    else:
        ways[_HNSWLIB] = _in_dram(hnswlib.Peer(), case, scratch / "hnswlib", _WALKS)
    return ways


def _memhier(case: SearchCase, path: Path, dram: int, *, held: bool) -> Way:
    ZoomIndex.build(path, case.base, metric=case.metric, dram=dram).close()
    index = ZoomIndex.open(path, pool=held)
    for _ in index.blocks() if held else ():  # every page is read once
        pass

    def ask(queries: Matrix, effort: Effort) -> Matrix:
        return index.search(queries[0], K, recall=effort["recall"]).ids

    return Way(memhier.Peer.efforts, ask, lambda: int(index.stats()["pages"]), index.memory_bytes)


def _in_dram(
    peer: faiss_refine.Peer | hnswlib.Peer, case: SearchCase, folder: Path, efforts: Sequence[Effort], **parameters: int
) -> Way:
    """Return a peer that holds its whole file in DRAM; a file that it maps is in the page cache once it was asked."""
    folder.mkdir()
    peer.load()
    parameters = dict(peer.build_parameters) | parameters
    peer.build(case.base, folder, 0, parameters)
    peer.open(folder, 0, parameters)
    held = sum(file.stat().st_size for file in folder.iterdir())
    return Way(efforts, lambda queries, effort: peer.search(queries, K, effort), lambda: 0, held)


def measure(way: Way, effort: Effort, asks: Iterator[Ask]) -> Row:
    """Ask the next queries, one at a time."""
    ask = next(asks)
    pages, before = way.pages(), process_time()
    found = [way.ask(ask.queries[at : at + 1], effort) for at in range(len(ask.queries))]
    spent = process_time() - before
    count = len(ask.queries)
    ids = np.vstack([np.asarray(each).reshape(1, K) for each in found])
    return {
        "recall": id_recall(ids, ask.ids),
        "cpu_ms": 1e3 * spent / count,
        "reads": (way.pages() - pages) / count,
    }


def sweep(case: SearchCase, share: float, scratch: Path) -> list[Row]:
    """Return a row for each setting of each way."""
    ways = open_ways(case, share, scratch)
    asks = [Ask.of(case, K, some) for some in np.array_split(case.queries, _ROUNDS)]
    settings = {(name, *effort.items()): (way, effort) for name, way in ways.items() for effort in way.efforts}
    for way, effort in settings.values():  # so that nothing is done for the first time
        way.ask(case.base[:1].astype(np.float32), effort)
    turns = {str(key): partial(measure, *setting, iter(asks)) for key, setting in settings.items()}
    found = by_turns(turns, _ROUNDS)
    return [
        {
            "way": key[0], "effort": ", ".join(f"{name} {value:g}" for name, value in effort.items()),
            "recall": float(np.mean([one["recall"] for one in found[str(key)]])),
            "cpu_ms": float(np.median([one["cpu_ms"] for one in found[str(key)]])),
            "reads": float(np.mean([one["reads"] for one in found[str(key)]])),
            "dram_share": way.dram / case.base.nbytes,
        }
        for key, (way, effort) in settings.items()
    ]  # fmt: skip


def cheapest(rows: Sequence[Row], target: float) -> dict[str, Row]:
    """Return of each way the row of least CPU that reaches a recall; none of one that does not."""
    best: dict[str, Row] = {}
    for row in rows:
        before = best.get(row["way"])
        if row["recall"] >= target and (before is None or row["cpu_ms"] < before["cpu_ms"]):
            best[row["way"]] = row | {"target": target}
    return best


def ratios(best: dict[str, Row], at: str) -> Iterator[Figure]:
    """Yield the CPU of the cold index over fast-scan's, and with DRAM for everything over that of the best peer."""
    scans = [row["cpu_ms"] for name, row in best.items() if name.startswith("faiss")]
    peers = [row["cpu_ms"] for name, row in best.items() if name not in (_COLD, _HELD)]
    for name, others, of in ((_COLD, scans, "fast-scan"), (_HELD, peers, "the better peer")):
        if name in best and others:
            yield Figure.of(f"CPU of {name}, by {of}, {at}", best[name]["cpu_ms"] / min(others), "ratio", "less")


@workload
@click.option("--data", "names", multiple=True, default=("small patches", "sift-imagenet200k"), show_default=True)
@click.option("--vectors", default=100_000, show_default=True, help="At most.")
@click.option("--queries", default=1000, show_default=True)
@click.option("--share", default=1 / 6, show_default="1/6", help="DRAM of the cold index, of the raw bytes.")
@click.option("--recall", "recalls", multiple=True, type=float, default=(0.9, 0.95, 0.98, 0.99), show_default=True)
def main(
    scratch: Path, names: tuple[str, ...], vectors: int, queries: int, share: float, recalls: tuple[float, ...]
) -> Outcome:
    """Compare at each recall, set by set."""
    every, shown, figures = list[Row](), list[dict[str, Any]](), list[Figure]()
    for name in names:
        case = FAMILIES["plain"][1](name, vectors, queries, 0)
        folder = scratch / name
        folder.mkdir()
        rows = [{"data": name} | row for row in sweep(case, share, folder)]
        every += rows
        for target in recalls:
            best = cheapest(rows, target)
            shown += [{column: row[column] for column in _COLUMNS} for row in best.values()]
            figures += figures_of([*best.values()], MEASURES, "{title}, {way}, {data}, {target:g} or more")
            figures += ratios(best, f"{name}, {target:g} or more")
    scale = f"{vectors:,} vectors at most, {queries:,} queries"
    tables = [rows_table(scale, shown)] if shown else [f"{scale}: no setting reaches a recall asked for"]
    return Outcome(Record(figures, scale=scale), tables, {"results": every})


if __name__ == "__main__":
    main()
