"""Routing of queries to their nearest lists: a graph of the MRNG rule, a comparison with all, and faiss's HNSW.

``python -m memhier.benchmarks.workloads.search.routing`` makes centroids of SIFT descriptors: by the training of an
index while there are some descriptors to a list, and beyond that as sums of near descriptors with random weights, in
the order of coarse clusters as a training leaves them. Queries are those of the set. ``ip`` is the same with the
coordinate that gives all centroids one norm, as inner products have it; ``among`` allows half of the lists. Recall is
the share of the nearest lists that are found. Ways take turns, by processor time of one thread. The peer has the
settings that memhier had: M 16, efConstruction 80, and an efSearch of twice the lists wanted.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import click
import faiss
import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.preview.clusters import train_centroids
from memhier.ann.zoom.preview.routing.linking import link_lists
from memhier.ann.zoom.preview.routing.list_graph import ListGraph
from memhier.ann.zoom.preview.routing.monotonic import without_monotonic_path
from memhier.ann.zoom.preview.routing.router import EXACT_LISTS, Router, walk_sight
from memhier.benchmarks.bench.figures import Record
from memhier.benchmarks.datasets import load_search_set
from memhier.benchmarks.workloads.harness import Measure, Outcome, Row, by_turns, figures_of, rows_table, workload

__all__ = ["main"]

_PER_LIST = 4  # descriptors, at least, of lists that are trained
_NEAR = 8  # descriptors that a made centroid is a sum of
_TARGETS = 200
_BLOCK = 8192
MEASURES = (
    Measure("recall", "recall of lists", "share", "more"),
    Measure("batch_ms", "CPU, in a batch", "ms a query", clock=True),
    Measure("alone_ms", "CPU, alone", "ms a query", clock=True),
    Measure("dram", "DRAM", "bytes a list"),
)

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]
Route: TypeAlias = Callable[[Floats], Ints]


def make_centroids(vectors: Floats, lists: int, seed: int) -> Floats:
    """Return the centroids of so many lists, float32 ``[lists, d]``."""
    if len(vectors) >= _PER_LIST * lists:
        return train_centroids(vectors, lists, seed)
    random = np.random.default_rng(seed)
    index = faiss.index_factory(vectors.shape[1], f"IVF{int(2 * len(vectors) ** 0.5)},Flat")
    index.train(vectors)
    index.add(vectors)
    index.nprobe = 6
    near = np.concatenate([index.search(vectors[at : at + _BLOCK], _NEAR)[1] for at in range(0, len(vectors), _BLOCK)])
    near = np.where(near < 0, near[:, :1], near)
    chosen = near[random.permutation(np.resize(np.arange(len(vectors)), lists))]
    weights = random.dirichlet(np.full(_NEAR, 0.7), lists).astype(np.float32)
    made = sum(weights[:, each, None] * vectors[chosen[:, each]] for each in range(_NEAR))
    coarse = train_centroids(vectors, int(lists**0.5), seed)
    return np.asarray(made[np.argsort(faiss.knn(made, coarse, 1)[1][:, 0], kind="stable")], np.float32)


def lifted(centroids: Floats, queries: Floats) -> tuple[Floats, Floats]:
    """Return centroids of one norm, and queries whose nearest have the largest inner products."""
    norms = np.linalg.norm(centroids, axis=1)
    more = np.sqrt(norms.max() ** 2 - norms**2)
    return np.column_stack([centroids, more]), np.column_stack([queries, np.zeros(len(queries), np.float32)])


def hnsw_of(centroids: Floats) -> tuple[faiss.IndexHNSWSQ, int]:
    """Return faiss's graph over centroids in half precision, and its DRAM."""
    index = faiss.IndexHNSWSQ(centroids.shape[1], faiss.ScalarQuantizer.QT_fp16, 16)
    index.hnsw.efConstruction = 80
    index.keep_max_size_level0 = True
    index.train(centroids)
    index.add(centroids)
    links = 4 * (index.hnsw.neighbors.size() + index.hnsw.levels.size()) + 8 * index.hnsw.offsets.size()
    return index, links + 2 * centroids.size


def measured(route: Route, queries: Floats, exact: Ints) -> Row:
    """Return recall, and the processor time of a query in a batch and of one alone."""
    started = time.thread_time()
    found = route(queries)
    batch = time.thread_time() - started
    some = queries[: max(1, len(queries) // 4)]
    started = time.thread_time()
    for query in some:
        route(query[None])
    alone = time.thread_time() - started
    recall = np.mean([len(np.intersect1d(*pair)) for pair in zip(found, exact, strict=True)]) / exact.shape[1]
    return {"recall": float(recall), "batch_ms": 1e3 * batch / len(queries), "alone_ms": 1e3 * alone / len(some)}


def routed(
    case: str, centroids: Floats, queries: Floats, probes: tuple[int, ...], rounds: int
) -> tuple[list[Row], str]:
    """Return rows of all ways through lists with these centroids, and a line on the graph."""
    halves = centroids.astype(np.float16)
    every, lists, started = Router(halves, None), len(halves), time.process_time()
    graph = ListGraph(halves, link_lists(halves))
    linking, started = time.process_time() - started, time.process_time()
    peer, peer_bytes = hnsw_of(centroids)
    peer_linking = time.process_time() - started
    targets = np.arange(0, lists, max(1, lists // _TARGETS))
    line = (
        f"{case}, {lists:,} lists: linked in {linking:.0f} s of CPU (faiss {peer_linking:.0f} s); "
        f"{(~graph.reached()).sum()} out of reach; "
        f"{len(without_monotonic_path(graph, targets))} of {len(targets)} without a monotonic path"
    )
    both, among = Router(halves, graph), np.arange(0, lists, 2)
    own = (halves.nbytes + graph.memory_bytes) / lists
    rows: list[Row] = []
    for wanted in (each for each in probes if 2 * each < lists):
        whole = partial(every.route, nprobe=wanted, in_order=True)
        part = partial(whole, among=among)
        ways: dict[str, tuple[Route, Route, float]] = {
            "compare all": (whole, whole, halves.nbytes / lists),
            "graph": (partial(graph.walk, wanted=wanted, sight=int(walk_sight(wanted))), whole, own),
            "faiss HNSW": (partial(through_peer, peer, wanted), whole, peer_bytes / lists),
            "half allowed": (partial(both.route, nprobe=wanted, in_order=True, among=among), part, own),
        }
        turns = {name: partial(measured, route, queries, true(queries)) for name, (route, true, _) in ways.items()}
        for name, made in by_turns(turns, rounds).items():
            row: Row = {"case": case, "lists": lists, "wanted": wanted, "way": name}
            medians = {column: float(np.median([each[column] for each in made])) for column in made[0]}
            rows.append(row | medians | {"dram": ways[name][2]})
    return rows, line


def through_peer(peer: faiss.IndexHNSWSQ, wanted: int, queries: Floats) -> Ints:
    """Return the lists that faiss's graph finds."""
    found: Ints = peer.search(queries, wanted, params=faiss.SearchParametersHNSW(efSearch=2 * wanted))[1]
    return found


@workload
@click.option("--data", default="sift-imagenet200k", show_default=True)
@click.option("--lists", multiple=True, type=int, default=(8192, 12_288, 16_384, 40_000, 400_000), show_default=True)
@click.option("--wanted", multiple=True, type=int, default=(64, 2048), show_default=True)
@click.option("--inner", multiple=True, type=int, default=(40_000,), show_default=True, help="Lists of the case ip.")
@click.option("--queries", "asked", default=200, show_default=True)
@click.option("--rounds", default=3, show_default=True)
def main(
    data: str, lists: tuple[int, ...], wanted: tuple[int, ...], inner: tuple[int, ...], asked: int, rounds: int
) -> Outcome:
    """Measure routing to lists."""
    case = load_search_set(data)
    vectors, queries = case.base.astype(np.float32), case.queries[:asked].astype(np.float32)
    rows: list[Row] = []
    lines = [f"an index compares all of up to {EXACT_LISTS:,} lists"]
    for each in lists:
        centroids = make_centroids(vectors, each, 0)
        cases = {"l2": (centroids, queries)} | ({"ip": lifted(centroids, queries)} if each in inner else {})
        for name, (points, aims) in cases.items():
            made, line = routed(name, points, aims, wanted, rounds)
            rows += made
            lines.append(line)
    figures = figures_of(rows, MEASURES, "{title}, {way}, {wanted} of {lists} lists, {case}")
    return Outcome(Record(figures), [*lines, rows_table("routing", rows)], {"results": rows})


if __name__ == "__main__":
    main()
