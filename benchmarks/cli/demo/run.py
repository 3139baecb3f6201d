"""The demo from one end to the other: read, project, index, then measure the index opened cold."""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
from tqdm import tqdm

from memhier.ann import ZoomIndex
from memhier.benchmarks.cli.demo.corpus import Corpus, CorpusFacts, Listing, write_corpus
from memhier.benchmarks.cli.demo.measure import RECALLS, Cost, K, Truth, choose_queries, measure_costs, share_found
from memhier.benchmarks.cli.demo.place import Built, Place
from memhier.benchmarks.cli.demo.projection import DIMENSION, Projection
from memhier.benchmarks.cli.demo.sources import SourceFile, fingerprint, installed_roots, source_files
from memhier.benchmarks.cli.demo.stages import Stages
from memhier.benchmarks.cli.demo.workers import read_files
from memhier.benchmarks.exact import exact_neighbours
from memhier.benchmarks.machine import describe_machine
from memhier.errors import BudgetError

__all__ = ["Answer", "Asked", "Report", "answer", "build", "measure", "up_to_date"]

T = TypeVar("T")

BUDGET_SHARE = 10  # the index gets a tenth of the size of the raw vectors
BUDGET_STEP = 64 << 10
QUERIES_MIN = 128  # half of them tune the index, which takes 64


@dataclass(frozen=True, slots=True)
class Asked:
    """The user's options; None for the default.

    Attributes
    ----------
    seed
        Of every random choice; 0 by default.
    limit
        Functions at most; all by default.
    dram
        Budget of the index in bytes; a tenth of the raw vectors by default.
    """

    seed: int | None = None
    limit: int | None = None
    dram: int | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """All results of the demo, ready for JSON by :func:`dataclasses.asdict`.

    Attributes
    ----------
    corpus
        The facts about the sources.
    tuning, queries
        Number of held-out sentences that the index was tuned with, and of those that were then used as queries.
    found_exact
        Share of queries that find their function in the first 10 of exact search.
    as_built
        Cold searches in the index as it was built, calibrated on vectors of its own; by declared recall.
    tuned
        Likewise, in the index tuned.
    index
        :meth:`ZoomIndex.stats` of the tuned index after the measurement.
    seconds
        Of each stage.
    path
        Folder of the built demo.
    machine
        The machine that the figures were measured on.
    """

    corpus: CorpusFacts
    tuning: int
    queries: int
    found_exact: float
    as_built: list[Cost]
    tuned: list[Cost]
    index: dict[str, Any]
    seconds: dict[str, float]
    path: str
    machine: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """A function near a query, with its cosine distance."""

    function: Listing
    distance: float


def up_to_date(place: Place, asked: Asked) -> bool:
    """Return whether the current demo has the sources of today and the user's options."""
    built = place.built()
    if built is None or built.fingerprint != fingerprint(source_files(installed_roots())):
        return False
    wanted = {name: value for name, value in dataclasses.asdict(asked).items() if value is not None}
    return all(getattr(built, name) == value for name, value in wanted.items())


def build(place: Place, asked: Asked, stages: Stages) -> CorpusFacts:
    """Read the installation and build its index; the place's current demo is replaced in the last step.

    Raises
    ------
    BudgetError
        When the budget asked for is too small.
    click.ClickException
        When the installation holds fewer than ten functions.
    """
    files = list(source_files(installed_roots()))
    seed = asked.seed or 0
    with place.replaced(Built(fingerprint(files), seed, asked.limit, asked.dram)) as folder:
        facts = _read(folder, files, asked.limit, stages)
        if facts.functions < K:
            raise click.ClickException(
                f"only {facts.functions} functions in {facts.files} files of {sys.prefix}: the demo needs {K}; "
                "it reads .py files of the standard library and of site-packages"
            )
        corpus = Corpus(folder)
        with stages.run("Find the directions that differ most"):
            projection = Projection.fit(corpus, seed)
            projection.save(folder / "projection.npz")
        _write_vectors(folder, corpus, projection, stages)
        with stages.run("Build the index", bar=False):
            _build_index(folder, asked.dram, seed)
    return facts


def _read(folder: Path, files: Sequence[SourceFile], limit: int | None, stages: Stages) -> CorpusFacts:
    with (
        stages.run("Read the Python installation", len(files), "files") as bar,
        closing(read_files(files)) as results,  # limit reached or not: no process outlives the stage
    ):
        return write_corpus(folder, _counted(results, bar), limit)


def _counted(results: Iterator[T], bar: "tqdm[Any]") -> Iterator[T]:
    for result in results:
        bar.update()
        yield result


def _write_vectors(folder: Path, corpus: Corpus, projection: Projection, stages: Stages) -> None:
    shape = (len(corpus), DIMENSION)
    # Written, not mapped: a full disk is an error here and would be the end of the process there.
    with open(folder / "vectors.npy", "wb") as file, stages.run("Write the vectors", shape[0], "vectors") as bar:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
        for block in projection.vectors(corpus):
            file.write(block.astype("<f4", copy=False).data)
            bar.update(len(block))


def _build_index(folder: Path, dram: int | None, seed: int) -> None:
    vectors = np.load(folder / "vectors.npy", mmap_mode="r")
    budget = dram or max(vectors.nbytes // BUDGET_SHARE, BUDGET_STEP)
    while True:
        try:
            ZoomIndex.build(
                folder / "index", vectors, metric="cosine", dram=budget, seed=seed, progress=sys.stderr.isatty()
            ).close()
            return
        except BudgetError:
            if dram is not None:
                raise
            budget += BUDGET_STEP  # buffers have a fixed size, more than a tenth of a small corpus


def measure(place: Place, facts: CorpusFacts, asked: Asked, stages: Stages) -> Report:
    """Open the index cold, compare it with exact search, and tune it for queries in words.

    The tuned index stays: later queries are in words as well.

    Raises
    ------
    click.ClickException
        When too few docstrings are long enough for a query.
    """
    folder = place.current
    corpus, projection = Corpus(folder), Projection.load(folder / "projection.npz")
    with stages.run("Search exactly"):
        rows, sentences = choose_queries(corpus, asked.seed or 0)
        if len(rows) < QUERIES_MIN:
            raise click.ClickException(
                f"only {len(rows)} of the {len(corpus):,} functions have a docstring that would do as a query: "
                f"the demo needs {QUERIES_MIN} of them; raise --limit"
            )
        queries = projection.queries(sentences)
        vectors = np.load(folder / "vectors.npy", mmap_mode="r")
        learned, truth = Truth(np.array(rows), queries, *exact_neighbours(vectors, queries, K, "cosine")).halves()
    path = folder / "index"
    with ZoomIndex.open(path) as as_built, ZoomIndex.open(path, writable=True) as tuned:
        with stages.run("Tune the index"):
            tuned.tune(learned.queries)
        settings = [(index, recall) for index in (as_built, tuned) for recall in RECALLS]
        with stages.run("Search the index from SSD", len(settings) * len(truth.rows), "searches") as bar:
            costs = measure_costs(settings, truth, bar.update)
        stats = tuned.stats()
    return Report(
        corpus=facts,
        tuning=len(learned.rows),
        queries=len(truth.rows),
        found_exact=share_found(truth.rows, truth.ids),
        as_built=costs[: len(RECALLS)],
        tuned=costs[len(RECALLS) :],
        index=stats,
        seconds=stages.seconds,
        path=str(folder),
        machine=describe_machine(),
    )


def answer(place: Place, query: str) -> list[Answer]:
    """Return the ten functions nearest to a query in plain words.

    Raises
    ------
    ValueError
        When the query holds no word.
    """
    vector = Projection.load(place.current / "projection.npz").queries([query])[0]
    with ZoomIndex.open(place.current / "index") as index:
        result = index.search(vector, min(K, len(index)))
    corpus = Corpus(place.current)
    pairs = zip(result.ids.tolist(), result.distances.tolist(), strict=True)
    return [Answer(corpus.listing(row), distance) for row, distance in pairs]
