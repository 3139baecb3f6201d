"""The process in which a peer builds or searches: ``python -m memhier.benchmarks.peers.worker job.json``.

It runs in the peer's environment and imports nothing but numpy beside the peer. Figures go to the file that the job
names: a library that prints, or kills its process, cannot garble them.
"""

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from memhier.benchmarks.peers.account import PageCache, PeakMemory, Usage, cap_memory, memory_now
from memhier.benchmarks.peers.base import Effort, Matrix, SearchPeer

__all__ = ["build", "main", "make_peer", "search"]


def make_peer(name: str) -> SearchPeer:
    """Return the adapter in the module of this name."""
    peer = import_module(f"memhier.benchmarks.peers.{name}").Peer()
    assert isinstance(peer, SearchPeer)
    return peer


def build(job: dict[str, Any]) -> dict[str, Any]:
    """Build an index and return its cost: CPU seconds, peak memory, bytes of its files."""
    peer = make_peer(job["peer"])
    peer.load()
    folder = Path(job["folder"])
    folder.mkdir(parents=True)
    vectors = _as_stored(peer, np.load(job["vectors"], mmap_mode="r"))
    with PeakMemory() as peak:
        before = Usage.now()
        peer.build(vectors, folder, job["dram_bytes"], job["parameters"])
        used = Usage.now() - before
    return {
        "cpu_s": used.cpu_s,
        "wall_s": used.wall_s,
        "read_bytes": used.read_bytes,
        "peak_rss_bytes": peak.rss_bytes,
        "peak_private_bytes": peak.private_bytes,
        "file_bytes": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        "stored_dtype": str(vectors.dtype),
    }


def search(job: dict[str, Any]) -> dict[str, Any]:
    """Open an index and sweep the efforts, cold; return a row for each, its ids in an ``.npz`` beside them."""
    peer = make_peer(job["peer"])
    peer.load()
    queries = _as_stored(peer, np.load(job["queries"]))
    k, dram = job["k"], job["dram_bytes"]
    cache = PageCache(Path(job["folder"]))
    # All answers, and the half megabyte that the first queries ever measured take, belong to the measurement.
    answers = np.full((len(job["efforts"]), 2, len(queries), k), -1, np.int64)
    _single(_Nothing(), queries, {}, cache, dram, 0, np.empty((len(queries), k), np.int64))
    baseline = memory_now()
    if job["cap_memory"]:
        cap_memory(dram + peer.headroom)
    opening = Usage.now()
    peer.open(Path(job["folder"]), dram, job["parameters"])
    opened = Usage.now() - opening
    rows, is_batched = [], peer.batch and peer.io in ("direct", "none")
    for number, effort in enumerate(job["efforts"]):
        if "read_ahead" in effort:
            cache.read_ahead(bool(effort["read_ahead"]))
        row = _single(peer, queries, effort, cache, dram, baseline, answers[number, 0])
        # Within one call nothing keeps the page cache to the budget, so that only peers without it are asked.
        if is_batched:
            row |= _batch(peer, queries, effort, cache, answers[number, 1])
        rows.append(row | {"effort": effort, "private_bytes": memory_now() - baseline})
    found = {str(number): each[0] for number, each in enumerate(answers)}
    found |= {f"{number}-batch": each[1] for number, each in enumerate(answers) if is_batched}
    np.savez(job["ids"], allow_pickle=False, **found)
    opened_row = {"open_cpu_s": opened.cpu_s, "open_wall_s": opened.wall_s, "held_bytes": peer.held_bytes()}
    return opened_row | {"io": peer.io, "stored_dtype": str(queries.dtype), "rows": rows}


class _Searcher(Protocol):
    """An open index."""

    @property
    def io(self) -> str:
        """How it reads; see :class:`SearchPeer`."""

    def search(self, queries: Matrix, k: int, effort: Effort) -> Matrix:
        """Return ids ``[q, k]``."""


class _Nothing:
    """An index without vectors: its queries take the memory of the measurement alone."""

    io = "direct"

    def search(self, queries: Matrix, k: int, effort: Effort) -> Matrix:
        """Return no neighbour for any query."""
        return np.full((len(queries), k), -1, np.int64)


def _single(
    peer: _Searcher, queries: Matrix, effort: Effort, cache: PageCache, dram: int, baseline: int, ids: Matrix
) -> dict[str, Any]:
    """Ask one query at a time, for `ids` ``[q, k]``; the cost of keeping the page cache in the budget is left out."""
    k = ids.shape[1]
    seconds = np.empty(len(queries))
    cache.drop()
    keep, drops, cached, kept_s = peer.io in ("buffered", "mapped"), 0, 0, 0.0
    before = Usage.now()
    for row in range(len(queries)):
        started = time.perf_counter()
        answer = peer.search(queries[row : row + 1], k, effort)
        seconds[row] = time.perf_counter() - started
        ids[row : row + 1] = _whole(answer, k)
        if keep:
            cpu = time.process_time()
            cached = max(cached, resident := cache.resident_bytes())
            if resident > (allowed := max(0, dram - (memory_now() - baseline))):
                cache.shrink(allowed)
                drops += 1
            kept_s += time.process_time() - cpu
    used = Usage.now() - before
    count = len(queries)
    return {
        "queries": count,
        "cpu_ms": 1e3 * (used.cpu_s - kept_s) / count,
        "pages": used.read_bytes / 4096 / count,
        "mean_ms": 1e3 * float(seconds.mean()),
        "p50_ms": 1e3 * float(np.percentile(seconds, 50)),
        "p99_ms": 1e3 * float(np.percentile(seconds, 99)),
        "cache_drops": drops,
        "cached_bytes": cached,
    }


def _batch(peer: SearchPeer, queries: Matrix, effort: Effort, cache: PageCache, ids: Matrix) -> dict[str, Any]:
    """Ask all queries in one call, for `ids` ``[q, k]``."""
    cache.drop()
    before = Usage.now()
    answer = peer.search(queries, ids.shape[1], effort)
    used = Usage.now() - before
    count, ids[:] = len(queries), _whole(answer, ids.shape[1])
    return {
        "batch_cpu_ms": 1e3 * used.cpu_s / count,
        "batch_wall_ms": 1e3 * used.wall_s / count,
        "batch_pages": used.read_bytes / 4096 / count,
    }


def _whole(ids: Matrix, k: int) -> Matrix:
    """Return ids ``[q, k]``: missing answers become -1, which counts for nothing."""
    return np.pad(np.asarray(ids, np.int64), ((0, 0), (0, k - ids.shape[1])), constant_values=-1)


def _as_stored(peer: SearchPeer, vectors: Matrix) -> Matrix:
    return vectors if str(vectors.dtype) in peer.dtypes else vectors.astype(np.float32)


def main() -> None:
    """Run the job in the file named on the command line."""
    job = json.loads(Path(sys.argv[1]).read_text())
    result = {"build": build, "search": search}[job["action"]](job)
    Path(job["out"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
