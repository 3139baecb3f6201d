"""The workloads of search: data, truth, builds once each, then sweeps of all peers by turns."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import memhier
from memhier.benchmarks.bench.results import Results
from memhier.benchmarks.bench.workload import PeerEntry, Size, Workload
from memhier.benchmarks.datasets import load_search_set
from memhier.benchmarks.exact import distances_of, exact_neighbours, id_recall, recall_at_k
from memhier.benchmarks.generators import Mixed, mixed
from memhier.benchmarks.machine import Neighbours
from memhier.benchmarks.patches import PatchStream
from memhier.benchmarks.peers.base import Effort
from memhier.benchmarks.peers.process import PeerError, find_python, peer_version, run_job
from memhier.benchmarks.peers.worker import make_peer

__all__ = ["run_search"]

_TRUTH_QUERIES = 1000
_STREAMS: dict[str, Callable[..., Mixed | PatchStream]] = {"mixed": mixed, "colour patches": PatchStream}
_SEARCH_SOURCES = Path(memhier.__file__).parent / "ann" / "zoom"
Say = Callable[[str], None]


def run_search(
    workload: Workload, size: Size, work: Path, environments: Path, results: Results, only: tuple[str, ...], say: Say
) -> None:
    """Run every task of a search workload that has no outcome yet."""
    parameters = workload.at(size)
    try:
        data = _Data(parameters, work / "data")
    except FileNotFoundError as error:
        about = {"workload": workload.name, "size": size, "stage": "data"}
        results.add(f"{workload.name}/{size}", kind="skipped", why=str(error), **about)
        return
    # Replaces the row of an earlier run that found the data missing.
    whole = {"vectors": data.count, "raw_bytes": data.raw_bytes, "dtype": data.dtype}
    if not results.is_done(f"{workload.name}/{size}"):
        results.add(f"{workload.name}/{size}", kind="data", workload=workload.name, size=size, **whole)
    entries = [entry for entry in workload.peers if not only or entry.name in only or entry.adapter in only]
    ready = []
    for entry in entries:
        say(f"{workload.name}: building {entry.name}")
        competitor = _Competitor(workload.name, size, entry, data, parameters, work / "indexes", environments)
        if competitor.build(results):
            ready.append(competitor)
    # By turns, so that a neighbour that comes and goes disturbs all alike.
    for turn in range(parameters["rounds"]):
        for competitor in ready:
            say(f"{workload.name}: searching with {competitor.entry.name}, round {turn + 1}")
            competitor.search(results, turn)


class _Data:
    """Vectors and queries as files that peers map, and the true neighbours."""

    def __init__(self, parameters: dict[str, Any], folder: Path) -> None:
        name, count = parameters["data"], parameters.get("vectors")
        folder.mkdir(parents=True, exist_ok=True)
        wide = f"-{parameters['dimension']}" if name in _STREAMS else ""
        stem = folder / f"{name}-{count or 'all'}{wide}"
        self.name = stem.name
        self.vectors, self.queries = stem.with_suffix(".npy"), stem.with_suffix(".queries.npy")
        truth = stem.with_suffix(f".truth{parameters['k']}.npz")
        if not truth.exists():
            true_ids = self._make(name, count, parameters)
            base, queries = np.load(self.vectors, mmap_mode="r"), np.load(self.queries)
            if true_ids is None:
                ids, distances = exact_neighbours(base, queries, parameters["k"])
            else:
                ids, distances = true_ids, distances_of(base, queries, true_ids)
            # Written last, and by renaming: an interrupted run begins again.
            np.savez(stem.with_suffix(".part.npz"), ids=ids, distances=distances)
            stem.with_suffix(".part.npz").rename(truth)
        with np.load(truth) as loaded:
            self._ids, self._distances = loaded["ids"], loaded["distances"]
        base = np.load(self.vectors, mmap_mode="r")
        self.count, self.raw_bytes, self.dtype = len(base), base.nbytes, str(base.dtype)

    def _make(self, name: str, count: int | None, parameters: dict[str, Any]) -> npt.NDArray[np.int64] | None:
        """Write vectors and queries, and return the true neighbours' ids if a file of the data set has them."""
        if name in _STREAMS:
            assert count is not None
            made = _STREAMS[name](count, parameters["dimension"], seed=0)
            out = np.lib.format.open_memmap(self.vectors, "w+", np.float32, (count, parameters["dimension"]))
            at = 0
            for block in made.blocks():
                out[at : at + len(block)] = block
                at += len(block)
            out.flush()
            np.save(self.queries, made.queries(_TRUTH_QUERIES))
            return None
        read = load_search_set(name)
        np.save(self.vectors, read.base[:count])
        np.save(self.queries, read.queries[:_TRUTH_QUERIES])
        if read.truth is None or (count is not None and count < len(read.base)):
            return None
        return read.truth[:_TRUTH_QUERIES, : parameters["k"]]

    def recalls(self, ids: npt.NDArray[np.int64]) -> dict[str, float]:
        """Return recall by id and by distance of answers to the first queries."""
        count = len(ids)
        base, queries = np.load(self.vectors, mmap_mode="r"), np.load(self.queries)[:count]
        found = distances_of(base, queries, ids)
        return {
            "recall_id": id_recall(ids, self._ids[:count]),
            "recall": recall_at_k(found, self._distances[:count]),
        }


class _Competitor:
    """One peer in one workload: its index is built once and kept, its searches repeated."""

    def __init__(
        self, workload: str, size: Size, entry: PeerEntry, data: _Data, parameters: dict[str, Any], indexes: Path,
        environments: Path,
    ) -> None:  # fmt: skip
        self.entry, self._data, self._parameters = entry, data, parameters
        self._environments = environments
        self._indexes = indexes
        self._dram = int(parameters["dram_share"] * data.raw_bytes)
        self._task = f"{workload}/{size}/{entry.name}"
        self._about = {"workload": workload, "size": size, "peer": entry.name, "adapter": entry.adapter}

    def build(self, results: Results) -> bool:
        """Build unless the index is there; return whether there is one to search."""
        task = f"{self._task}/build"
        # Whatever a peer, its adapter or its environment does, the others are measured.
        try:
            self._peer = make_peer(self.entry.adapter)
            self._build = dict(self._peer.build_parameters) | self.entry.build
            self._python = find_python(self._peer, self._environments)
            version = peer_version(self._peer, self._python)
            self._folder = self._indexes / self._data.name / f"{self.entry.name}-{self._digest(version)}"
            built = self._build_or_read()
        except Exception as error:
            results.add(task, kind="failed", stage="build", why=_why(error), **self._about)
            return False
        if not results.is_done(task, self._folder.name):
            sizes = {"vectors": self._data.count, "raw_bytes": self._data.raw_bytes, "dram_bytes": self._dram}
            settings = {"parameters": self._build, "version": version, "dtype": self._data.dtype}
            results.add(task, kind="build", settings=self._folder.name, **self._about, **settings, **sizes, **built)
        return True

    def _build_or_read(self) -> dict[str, Any]:
        """Return the figures of the build, which stand beside the index once it is whole."""
        figures = self._folder.with_suffix(".json")
        if not figures.exists() or not self._folder.is_dir():
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            job = {"action": "build", "vectors": str(self._data.vectors)} | self._job(self._build)
            with Neighbours() as neighbours:
                made = run_job(self._python, job, self._parameters["timeout_s"])
            part = figures.with_suffix(".part")
            part.write_text(json.dumps(made | {"others": neighbours.cores}))
            part.rename(figures)
        built: dict[str, Any] = json.loads(figures.read_text())
        return built

    def search(self, results: Results, turn: int) -> None:
        """Sweep the efforts once in a fresh process, unless that was done."""
        task = f"{self._task}/search/{turn}"
        count = min(self._parameters["queries"], _TRUTH_QUERIES)
        efforts = self._efforts()
        settings = json.dumps([self._folder.name, count, self._parameters["k"], self.entry.open, efforts])
        if results.is_done(task, settings):
            return
        queries, ids = self._folder.with_suffix(".queries.npy"), self._folder.with_suffix(".ids.npz")
        np.save(queries, np.load(self._data.queries)[:count])
        job = {
            "action": "search",
            "queries": str(queries),
            "k": self._parameters["k"],
            "efforts": efforts,
            "cap_memory": self._peer.io != "none",
            "ids": str(ids),
        }
        try:
            with Neighbours() as neighbours:
                found = run_job(self._python, job | self._job(self.entry.open), self._parameters["timeout_s"])
            with np.load(ids) as answers:
                for number, row in enumerate(found["rows"]):
                    row |= self._data.recalls(answers[str(number)])
                    if f"{number}-batch" in answers:
                        row["batch_recall"] = self._data.recalls(answers[f"{number}-batch"])["recall"]
        except Exception as error:
            results.add(task, kind="failed", stage="search", why=_why(error), round=turn, **self._about)
            return
        found |= {"dram_bytes": self._dram, "others": neighbours.cores}
        results.add(task, kind="search", settings=settings, round=turn, **self._about, **found)

    def _efforts(self) -> list[Effort]:
        # Counted from the most thorough, which alone may reach a recall.
        efforts = list(self.entry.efforts or self._peer.efforts)[:: -self._parameters["sweep_step"]][::-1]
        if self._peer.io != "mapped":
            return efforts
        # With read-ahead a map takes fewer faults, without it fewer pages: the device decides which is better.
        return [effort | {"read_ahead": ahead} for ahead in (1, 0) for effort in efforts]

    def _job(self, parameters: dict[str, Any]) -> dict[str, Any]:
        return {
            "peer": self.entry.adapter,
            "folder": str(self._folder),
            "dram_bytes": self._dram,
            "parameters": parameters,
        }

    def _digest(self, version: str) -> str:
        settings = {"build": self._build, "version": version, "dram": self._dram}
        if self.entry.adapter == "memhier":
            # Its version does not change with each edit of its sources.
            settings["sources"] = [path.read_text() for path in sorted(_SEARCH_SOURCES.rglob("*.py"))]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, PeerError) else f"{type(error).__name__}: {error}"
