"""An index that lives through a runbook: recall at every step, the time of each commit, and renewals.

``python -m memhier.benchmarks.workloads.streams.streaming`` follows the generated runbooks of
`memhier.benchmarks.workloads.streams.runbooks` over whitened patches and real descriptors, with a commit at each
change. ``--runbook FILE`` follows a published one over the first vectors of a set. At every search the nearest of
the vectors there are come from exact comparison. Beside stands an IVF of faiss whose lists are trained once, at the
first search, probed as wide as recall .95 took then. Times and bytes of commits are of the thread that calls. Steps of
the clustered runbook change from none to a tenth of all vectors, so the longest commit is compared with the time that
as many rows take as well.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import click
import faiss
import numpy as np
import numpy.typing as npt

from memhier.ann import ZoomIndex
from memhier.benchmarks.bench.figures import Record
from memhier.benchmarks.exact import exact_neighbours, recall_at_k
from memhier.benchmarks.workloads.harness import Measure, Outcome, Row, figures_of, rows_table, skip, workload
from memhier.benchmarks.workloads.search.recall import READS
from memhier.benchmarks.workloads.search.sets import make_set
from memhier.benchmarks.workloads.streams.runbooks import GENERATED, Step, read_runbook

__all__ = ["main"]

K = 10
ASKED, WANTED = 0.98, 0.95  # queries of all times are unlike the vectors of one, for which recall is declared
_ROOM = 2 << 20  # bytes of DRAM for the buffers of searches
MEASURES = (
    Measure("least recall", "least recall@10 of a step", "share", "more"),
    Measure("recall", "mean recall@10", "share", "more"),
    Measure("IVF least", "least recall@10 of a step, IVF never made anew", "share", "more"),
    Measure("IVF codes", "vectors compared, IVF never made anew", "a query"),
    Measure("codes", "codes", "compared a query"),
    Measure("pages", "pages", READS),
    Measure("most pages", "most pages of a step", READS),
    Measure("CPU ms", "CPU", "ms a query"),
    Measure("commit CPU ms", "median commit, CPU", "ms"),
    Measure("longest CPU", "longest commit, CPU", "times the median"),
    Measure("longest by rows", "longest commit for its rows, CPU", "times the median or that of its rows"),
    Measure("longest", "longest commit", "times the median", clock=True),
    Measure("commit KiB", "median commit, written", "KiB"),
    Measure("most KiB", "most written by a commit", "KiB"),
    Measure("renewals", "renewals", "times"),
    Measure("DRAM", "most DRAM", "bytes"),
)

Vectors: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


class _Peer:
    """faiss's IVF, trained at the first search; its lists never change."""

    def __init__(self, dimension: int) -> None:
        self._dimension = dimension
        self._index: Any = None

    def add(self, vectors: Floats, ids: Ints) -> None:
        if self._index is None:
            lists = max(1, len(vectors) // 100)
            self._index = faiss.IndexIVFFlat(faiss.IndexFlatL2(self._dimension), self._dimension, lists)
            self._index.train(vectors)
        self._index.add_with_ids(vectors, ids)

    def remove(self, ids: Ints) -> None:
        self._index.remove_ids(ids)

    def widen(self, queries: Floats, true: Floats) -> None:
        """Probe as many lists as the recall declared takes now."""
        while self.search(queries, true)[0] < WANTED and self._index.nprobe < self._index.nlist:
            self._index.nprobe += max(1, self._index.nprobe // 8)

    def search(self, queries: Floats, true: Floats) -> tuple[float, float]:
        """Return the recall, and the vectors compared for a query."""
        stats = faiss.cvar.indexIVF_stats
        stats.reset()
        near = self._index.search(queries, true.shape[1])[0]
        return recall_at_k(near, true), stats.ndis / len(queries)


class _Life:
    """An index, its peer and the vectors alive, through the steps of a runbook."""

    def __init__(self, vectors: Vectors, queries: Floats, dram: int, most: int, folder: Path) -> None:
        self._vectors, self._queries = vectors, queries
        self._row = np.full(len(vectors), -1)  # of each id, -1 where it is not alive
        self._index = ZoomIndex.build(folder, vectors[:0], dram=dram, grow_to=most)
        self._peer = _Peer(vectors.shape[1])
        self.steps: list[Row] = []
        self.commits: list[Row] = []
        self.memory = 0

    def follow(self, book: Sequence[Step], every: int) -> None:
        """Take all steps, and measure every so many searches."""
        searches = 0
        for step in book:
            if step.operation == "search":
                if searches % every == 0 and (self._row >= 0).sum() > K:
                    self._measure()
                searches += 1
            else:
                self._change(step)
        self._index.close()

    def _change(self, step: Step) -> None:
        rows, ids = np.arange(step.start, step.end), np.arange(step.tags_start, step.tags_end)
        started, cpu, written = time.perf_counter(), time.thread_time(), _written()
        if step.operation == "insert":
            self._index.add(self._vectors[rows], ids=rows)
        elif step.operation == "delete":
            self._index.remove(rows)
        else:
            self._index.update(ids, self._vectors[step.ids_start : step.ids_end])
        self._index.commit()
        spent = {"ms": 1e3 * (time.perf_counter() - started), "CPU": 1e3 * (time.thread_time() - cpu)}
        spent["KiB"] = (_written() - written) / 1024
        stats = self._index.stats()
        changed = len(rows) + len(ids)
        made = {"trained": stats["trained_vectors"], "calibrated": stats["calibrated_vectors"]}
        self.commits.append({"operation": step.operation, "rows": changed} | made | spent)
        self.memory = max(self.memory, stats["memory_bytes"])
        if step.operation == "insert":
            self._row[rows] = rows
            self._peer.add(self._vectors[rows].astype(np.float32), rows)
        elif step.operation == "delete":
            self._row[rows] = -1
            self._peer.remove(rows)
        else:
            self._row[ids] = np.arange(step.ids_start, step.ids_end)
            self._peer.remove(ids)
            self._peer.add(self._vectors[self._row[ids]].astype(np.float32), ids)

    def _measure(self) -> None:
        alive, queries = self._row[self._row >= 0], self._queries
        true = exact_neighbours(self._vectors[alive], queries, K)[1]
        cpu = time.thread_time()
        found = self._index.search(queries, K, recall=ASKED)
        cpu = time.thread_time() - cpu
        if not self.steps:
            self._peer.widen(queries, true)
        peer, compared = self._peer.search(queries, true)
        count, stats = len(queries), self._index.stats()
        self.steps.append({
            "live": len(alive), "recall": recall_at_k(found.distances, true), "IVF": peer, "IVF codes": compared,
            "pages": found.stats["page_requests"] / count, "codes": found.stats["scanned"] / count,
            "CPU ms": 1e3 * cpu / count, "lists": stats["lists"], "longest": stats["longest_list"],
            "parts": stats["parts"], "escalated": found.stats["escalated"],
        })  # fmt: skip


def _written() -> int:
    """Return the bytes that this thread has written to files; 0 where the system does not tell."""
    try:
        counts = dict(line.split(": ") for line in Path("/proc/thread-self/io").read_text().splitlines())
    except OSError:
        return 0
    return int(counts["wchar"])


def _longest_by_rows(commits: Sequence[Row]) -> float:
    """Return the most processor time of a commit, in times the median, or what its rows take if that is more.

    The rows of an operation take the median of its quarter with the fewest rows, and for each row the median of its
    half with more.
    """
    every, most = float(np.median([row["CPU"] for row in commits])), 0.0
    for operation in {row["operation"] for row in commits}:
        some = [(row["rows"], row["CPU"]) for row in commits if row["operation"] == operation]
        rows, cpu = np.array(some, float).T
        fixed, more = np.median(cpu[rows <= np.quantile(rows, 0.25)]), rows > np.median(rows)
        each = max(0.0, float(np.median((cpu[more] - fixed) / rows[more]))) if more.any() else 0.0
        most = max(most, float((cpu / np.maximum(every, fixed + each * rows)).max()))
    return most


def live(name: str, book: Sequence[Step], vectors: Vectors, queries: Floats, share: float, every: int,
         folder: Path) -> tuple[Row, _Life]:  # fmt: skip
    """Follow a runbook; return a row of its figures, and the life."""
    count = most = 0
    for step in book:
        count += {"insert": 1, "delete": -1}.get(step.operation, 0) * (step.end - step.start)
        most = max(most, count)
    dram = int(share * most * vectors[0].nbytes) + _ROOM
    life = _Life(vectors, queries, dram, 2 * most, folder / name.replace(" ", "-"))
    with ThreadPoolExecutor(1) as pool:  # a thread of its own, which no other serves, has its own clock
        pool.submit(life.follow, book, every).result()

    def column(rows: Sequence[Row], key: str) -> npt.NDArray[np.float64]:
        return np.array([row[key] for row in rows], float)

    steps, commits = life.steps, life.commits
    ms, cpu, kib = (column(commits, key) for key in ("ms", "CPU", "KiB"))
    return {
        "run": name, "most live": most, "commits": len(commits), "searches": len(steps),
        "least recall": column(steps, "recall").min(), "recall": column(steps, "recall").mean(),
        "IVF least": column(steps, "IVF").min(), "IVF codes": column(steps, "IVF codes").mean(),
        "codes": column(steps, "codes").mean(), "pages": column(steps, "pages").mean(),
        "most pages": column(steps, "pages").max(), "CPU ms": column(steps, "CPU ms").mean(),
        "commit ms": np.median(ms), "longest": ms.max() / np.median(ms), "commit CPU ms": np.median(cpu),
        "longest CPU": cpu.max() / np.median(cpu), "longest by rows": _longest_by_rows(commits),
        "commit KiB": np.median(kib), "most KiB": kib.max(),
        "renewals": int((np.diff(column(commits, "trained")) != 0).sum()), "DRAM": life.memory,
    }, life  # fmt: skip


@workload
@click.option("--count", default=100_000, show_default=True, help="Vectors of a set.")
@click.option("--data", "names", multiple=True, default=("patches", "sift-imagenet200k"), show_default=True)
@click.option("--books", multiple=True, default=tuple(GENERATED), show_default=True, type=click.Choice([*GENERATED]))
@click.option("--runbook", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A published runbook.")
@click.option("--steps", default=100, show_default=True, help="Steps of a generated runbook, at least.")
@click.option("--queries", "asked", default=200, show_default=True, help="Queries of a search.")
@click.option("--every", default=1, show_default=True, help="Searches of the runbook for one that is measured.")
@click.option("--share", default=0.4, show_default=True, help="DRAM as a share of the most vectors alive.")
@click.option("--all-steps", is_flag=True, help="Print each step.")
def main(
    scratch: Path, count: int, names: tuple[str, ...], books: tuple[str, ...], runbook: Path | None, steps: int,
    asked: int, every: int, share: float, all_steps: bool,
) -> Outcome:  # fmt: skip
    """Measure indexes that live through runbooks."""
    rows: list[Row] = []
    tables, details = [], {}
    for name in names:
        try:
            vectors, queries, _ = make_set(name, count, asked, 0)
        except FileNotFoundError as error:
            skip(error)
            continue
        floats = queries.astype(np.float32)
        chosen = {runbook.stem: read_runbook(runbook)} if runbook is not None else dict.fromkeys(books, None)
        for title, given in chosen.items():
            order, book = (np.arange(len(vectors)), given) if given is not None else GENERATED[title](
                vectors.astype(np.float32), steps, 0
            )  # fmt: skip
            row, life = live(f"{name} {title}", book, vectors[order], floats, share, every, scratch)
            rows.append(row)
            details[row["run"]] = {"steps": life.steps, "commits": life.commits}
            if all_steps:
                tables += [rows_table(f"{row['run']}: searches", life.steps), rows_table("commits", life.commits)]
    if rows:
        tables.append(rows_table("runbooks", rows))
    return Outcome(Record(figures_of(rows, MEASURES, "{title}, {run}")), tables, details)


if __name__ == "__main__":
    main()
