"""Late interaction: items of many vectors, ranked by MaxSim, with a tenth of their bytes in DRAM.

``python -m memhier.benchmarks.workloads.tokens.late_interaction`` makes items of real data (`token_sets`) and searches
them for the ten best. Beside MultiVectorIndex stand the comparison with all tokens, read from SSD, and PLAID (Santhanam
et al., CIKM 2022) written small: centroids and residuals of 2 bits a dimension in DRAM, candidates from the nearest
centroids of each query's vector, pruned by centroid interaction, and ranked by the decompressed residuals alone.
Queries come one at a time.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import click
import faiss
import numpy as np
import numpy.typing as npt

from memhier import Reader
from memhier.ann import MultiVectorIndex
from memhier.benchmarks.bench.figures import Record
from memhier.benchmarks.workloads.harness import Measure, Outcome, Row, by_turns, figures_of, rows_table, workload
from memhier.benchmarks.workloads.search.recall import READS
from memhier.benchmarks.workloads.tokens.token_sets import TOKEN_SETS, TokenSet, token_set

__all__ = ["PlaidLike", "main"]

K = 10
MEASURES = (
    Measure("overlap", "overlap of the best ten", "share", "more"),
    Measure("cpu_ms", "CPU", "ms a query", clock=True),
    Measure("pages", "pages", READS),
    Measure("dram", "DRAM", "of the tokens' bytes"),
)
_BITS = 2
_BLOCK = 1 << 14  # tokens that are compared at a time

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float32]
Answer: TypeAlias = Callable[[Floats], tuple[Ints, int]]


class PlaidLike:
    """PLAID's pruning: the centroid of each token and two bits for each dimension of its residual, all in DRAM.

    Parameters
    ----------
    tokens, lengths
        Of the items.
    centroids
        float32 ``[lists, d]``.
    probes, pruned
        Centroids for each vector of a query, and candidates that centroid interaction leaves; a quarter is
        decompressed.
    """

    def __init__(self, case: TokenSet, centroids: Floats, probes: int, pruned: int) -> None:
        self._centroids, self._probes, self._pruned = centroids, probes, pruned
        self._starts = np.concatenate([[0], np.cumsum(case.lengths)])
        nearest = faiss.IndexFlatL2(centroids.shape[1])
        nearest.add(centroids)
        self._lists = np.empty(len(case.tokens), np.int32)
        sample = np.random.default_rng(0).integers(len(case.tokens), size=1 << 14)
        floats = case.tokens[sample].astype(np.float32)
        residuals = floats - centroids[nearest.search(floats, 1)[1][:, 0]]
        self._cuts = np.quantile(residuals, np.arange(1, 2**_BITS) / 2**_BITS).astype(np.float32)
        self._values = np.quantile(residuals, (np.arange(2**_BITS) + 0.5) / 2**_BITS).astype(np.float32)
        self._codes = np.empty((len(case.tokens), centroids.shape[1] * _BITS // 8), np.uint8)
        for low in range(0, len(case.tokens), _BLOCK):
            floats = case.tokens[low : low + _BLOCK].astype(np.float32)
            lists = nearest.search(floats, 1)[1][:, 0]
            fields = np.searchsorted(self._cuts, floats - centroids[lists]).astype(np.uint8)
            self._lists[low : low + _BLOCK] = lists
            self._codes[low : low + _BLOCK] = sum(fields[:, at::4] << (2 * at) for at in range(4))
        items = np.repeat(np.arange(len(case.lengths)), case.lengths)
        pairs = np.unique(self._lists.astype(np.int64) << 32 | items)
        self._items = (pairs & 0xFFFFFFFF).astype(np.uint32)
        self._ends = np.searchsorted(pairs, np.arange(len(centroids) + 1, dtype=np.int64) << 32)
        held = (centroids, self._lists, self._codes, self._items, self._ends, self._starts)
        self.dram: int = sum(each.nbytes for each in held)

    def search(self, query: Floats) -> Ints:
        """Return the best items by their codes."""
        products = self._centroids @ query.T
        near = np.unique(np.argpartition(-products, self._probes, axis=0)[: self._probes])
        items = np.unique(np.concatenate([self._items[self._ends[each] : self._ends[each + 1]] for each in near]))
        for kept in (self._pruned, self._pruned // 4):
            items = items[np.argsort(-self._scores(items, query, products, kept < self._pruned), kind="stable")][:kept]
        return items[:K].astype(np.int64)

    def _scores(self, items: npt.NDArray[Any], query: Floats, products: Floats, whole: bool) -> Floats:
        lows, lengths = self._starts[items], np.diff(self._starts)[items]
        ends = np.concatenate([[0], np.cumsum(lengths)])
        rows = np.arange(ends[-1]) + np.repeat(lows - ends[:-1], lengths)
        scores = products[self._lists[rows]]
        if whole:
            tokens = self._centroids[self._lists[rows]]
            for at in range(4):
                tokens[:, at::4] += self._values[self._codes[rows] >> (2 * at) & 3]
            scores = (tokens / np.linalg.norm(tokens, axis=1, keepdims=True)) @ query.T  # of length one, as all tokens
        found: Floats = np.maximum.reduceat(scores, ends[:-1], axis=0).sum(axis=1)
        return found


def exhaustive(reader: Reader, file: int, case: TokenSet, query: Floats) -> Ints:
    """Return the best items by the exact MaxSim of all, whose tokens are read in blocks."""
    starts, width = np.concatenate([[0], np.cumsum(case.lengths)]), case.tokens.shape[1]
    scores, first = np.empty(len(case.lengths), np.float32), 0
    while first < len(case.lengths):
        stop = max(first + 1, int(np.searchsorted(starts, starts[first] + _BLOCK, side="right")) - 1)
        low, high = 2 * width * int(starts[first]), 2 * width * int(starts[stop])
        raw = reader.read(file, [low], high - low)[0].view(np.float16).reshape(-1, width)
        products = raw.astype(np.float32) @ query.T
        scores[first:stop] = np.maximum.reduceat(products, starts[first:stop] - starts[first], axis=0).sum(axis=1)
        first = stop
    return np.lexsort((np.arange(len(scores)), -scores))[:K]


def measured(answer: Answer, queries: list[Floats], truth: list[Ints]) -> Row:
    """Return overlap with the truth, processor time and pages of all queries."""
    hits, pages = 0.0, 0
    cpu = time.process_time()
    found = [answer(query) for query in queries]
    cpu = time.process_time() - cpu
    for (ids, read), best in zip(found, truth, strict=True):
        hits += len(np.intersect1d(ids, best)) / len(best)
        pages += read
    return {"overlap": hits / len(queries), "cpu_ms": 1e3 * cpu / len(queries), "pages": pages / len(queries)}


@workload
@click.option("--data", type=click.Choice(TOKEN_SETS), default="words", show_default=True)
@click.option("--dimension", default=128, show_default=True, help="Of a token; 64 for patches.")
@click.option("--count", default=0, help="Items; 0 takes all.")
@click.option("--queries", "asked", default=100, show_default=True)
@click.option("--share", default=0.1, show_default=True, help="DRAM as a share of the tokens' bytes.")
@click.option("--recall", "recalls", multiple=True, default=(0.9, 0.99), show_default=True)
@click.option("--pruned", default=4096, show_default=True, help="Candidates that PLAID's pruning leaves.")
@click.option("--rounds", default=3, show_default=True)
def main(
    scratch: Path, data: str, dimension: int, count: int, asked: int, share: float, recalls: tuple[float, ...],
    pruned: int, rounds: int,
) -> Outcome:  # fmt: skip
    """Measure searches for items of many vectors."""
    case = token_set(data, dimension, count, asked)
    total = case.tokens.nbytes
    started = time.process_time()
    path = scratch / "index"
    with MultiVectorIndex.build(path, case.tokens, lengths=case.lengths, dram=int(share * total)) as index:
        built = time.process_time() - started
        lists = index.stats()["lists"]
    sample = case.tokens[np.random.default_rng(0).integers(len(case.tokens), size=48 * lists)].astype(np.float32)
    trainer = faiss.Kmeans(dimension, lists, niter=4, seed=1, max_points_per_centroid=48)
    trainer.train(sample)
    plaid = PlaidLike(case, trainer.centroids, 4, pruned)
    raw = scratch / "tokens"
    case.tokens.tofile(raw)
    reader = Reader(depth=32)
    file = reader.add(raw)
    truth = [exhaustive(reader, file, case, query) for query in case.queries]
    whole = -(-total // 4096)

    def ours(declared: float) -> Row:
        with MultiVectorIndex.open(path) as index:

            def answer(query: Floats) -> tuple[Ints, int]:
                found = index.search(query, K, recall=declared)
                return found.ids, int(found.stats["pages"])

            return measured(answer, case.queries, truth) | {"dram": index.stats()["planned_bytes"] / total}

    def of_plaid() -> Row:
        return measured(lambda query: (plaid.search(query), 0), case.queries, truth) | {"dram": plaid.dram / total}

    def of_all() -> Row:
        found = measured(lambda query: (exhaustive(reader, file, case, query), whole), case.queries, truth)
        return found | {"dram": 2 * dimension * _BLOCK * 3 / total}

    ways: dict[str, Callable[[], Row]] = {"all tokens": of_all, "PLAID-like": of_plaid}
    ways |= {f"memhier {declared}": partial(ours, declared) for declared in recalls}
    rows = list[Row]()
    for system, made in by_turns(ways, rounds).items():
        medians: dict[str, Any] = {name: float(np.median([row[name] for row in made])) for name in made[0]}
        rows.append({"system": system} | medians)
    reader.close()
    shown = rows_table(f"{data}: {len(case.lengths):,} items, {len(case.tokens):,} tokens of {dimension}", rows)
    figures = figures_of(rows, MEASURES, "{title}, {system}")
    return Outcome(Record(figures), [shown, f"build {built:.0f} s of CPU"], {"results": rows})


if __name__ == "__main__":
    main()
