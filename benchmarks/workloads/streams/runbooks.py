"""Runbooks of the streaming track of big-ann-benchmarks 2023: read in their published form, and generated.

A runbook is a list of steps over numbered vectors: ranges are inserted, deleted, or replaced by others, and a search
comes between. Published runbooks are YAML (github.com/harsha-simhadri/big-ann-benchmarks, ``neurips23/runbooks``).
Generated ones follow the track's generators: a sliding window, clusters in five rounds, and times of expiry.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeAlias

import faiss
import numpy as np
import numpy.typing as npt

from memhier.errors import FormatError
from memhier.io.outside import reading

__all__ = ["GENERATED", "Step", "clustered", "expiring", "read_runbook", "sliding"]

_NEEDED = {
    "insert": ("start", "end"),
    "delete": ("start", "end"),
    "replace": ("tags_start", "tags_end", "ids_start", "ids_end"),
    "search": (),
}
_ROUNDS = 5
_MOST_DELETED = 0.9
_SAMPLED = 20_000
_KINDS = 26  # of vectors by their time of expiry: one stays, five live long, twenty briefly
_LONG, _SHORT = 5, 20

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a runbook.

    Attributes
    ----------
    operation
        ``insert``, ``delete``, ``replace`` or ``search``.
    start, end
        The range of vectors inserted, under their numbers as ids, or of ids deleted.
    tags_start, tags_end, ids_start, ids_end
        The range of ids whose vectors are replaced, and that of the vectors that replace them.
    """

    operation: str
    start: int = 0
    end: int = 0
    tags_start: int = 0
    tags_end: int = 0
    ids_start: int = 0
    ids_end: int = 0


def read_runbook(path: Path, name: str | None = None) -> list[Step]:
    """Return the steps of a published runbook; `name` is that of its data set, None for the only one.

    Raises
    ------
    FormatError
        When the file is no runbook, or has no such data set.
    """
    with reading(path, "a runbook as YAML"):
        text = path.read_text()
    sets: dict[str, dict[int, dict[str, str]]] = {}
    steps: dict[int, dict[str, str]] = {}
    entry: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        key, colon, value = (part.strip().strip("'\"") for part in line.split("#")[0].partition(":"))
        if not key:
            continue
        depth = len(line) - len(line.lstrip())
        if not colon:
            raise FormatError(f"{path}, line {number}: {line.strip()!r}: expected a key, a colon and perhaps a value")
        if depth == 0:
            steps = sets.setdefault(key, {})
        elif not value and key.isdigit():
            entry = steps.setdefault(int(key), {})
        elif value and not key.isdigit() and key not in ("max_pts", "gt_url"):
            entry[key] = value
    if name is None and len(sets) != 1:
        raise FormatError(f"{path}: data sets {', '.join(sets) or 'none'}: name one of them")
    chosen = next(iter(sets)) if name is None else name
    if chosen not in sets:
        raise FormatError(f"{path}: no data set {chosen!r}: expected one of {', '.join(sets)}")
    return [_step(path, number, sets[chosen][number]) for number in sorted(sets[chosen])]


def _step(path: Path, number: int, entry: dict[str, str]) -> Step:
    operation = entry.get("operation", "")
    if operation not in _NEEDED:
        raise FormatError(f"{path}, step {number}: operation {operation!r}: expected one of {', '.join(_NEEDED)}")
    known = {each.name for each in fields(Step)} - {"operation"}
    try:
        step = Step(operation, **{key: int(value) for key, value in entry.items() if key in known})
    except ValueError as error:
        raise FormatError(f"{path}, step {number}: {error}") from error
    for key in _NEEDED[operation]:
        if key not in entry:
            raise FormatError(f"{path}, step {number}: {operation} without {key}")
    for low, high in ((step.start, step.end), (step.tags_start, step.tags_end), (step.ids_start, step.ids_end)):
        if not 0 <= low <= high:
            raise FormatError(f"{path}, step {number}: the range {low} to {high} is none")
    if step.tags_end - step.tags_start != step.ids_end - step.ids_start:
        raise FormatError(f"{path}, step {number}: replaces {step.tags_end - step.tags_start} vectors by others")
    return step


def sliding(count: int, steps: int) -> list[Step]:
    """Return the runbook of a sliding window over half of `count` vectors, inserted in so many steps."""
    edges, half = np.linspace(0, count, steps + 1).astype(int).tolist(), steps // 2
    book: list[Step] = []
    for number in range(steps):
        if number >= half:
            book += [Step("search"), Step("delete", edges[number - half], edges[number - half + 1])]
        book.append(Step("insert", edges[number], edges[number + 1]))
    return [*book, Step("search")]


def expiring(count: int, steps: int, seed: int = 0) -> list[Step]:
    """Return the runbook of vectors with times of expiry.

    Of 26 blocks inserted one stays, five stay for a fifth of the steps, and twenty for a twentieth.
    """
    edges, random = np.linspace(0, count, steps + 1).astype(int).tolist(), np.random.default_rng(seed)
    expired: dict[int, list[int]] = {}
    book: list[Step] = []
    for number in range(steps):
        book.append(Step("insert", edges[number], edges[number + 1]))
        if (kind := int(random.integers(0, _KINDS))) > 0:
            life = max(1, steps // (_LONG if kind <= _LONG else _SHORT))
            expired.setdefault(number + life, []).append(number)
        book += [Step("delete", edges[each], edges[each + 1]) for each in expired.get(number, [])]
        book.append(Step("search"))
    return book


def clustered(sizes: Sequence[int], seed: int = 0) -> list[Step]:
    """Return the runbook of clusters of these sizes, whose vectors are numbered cluster by cluster.

    In each of five rounds every cluster gains a fifth of its vectors, one cluster after the other, then loses up to
    nine tenths of those it has.
    """
    random, offsets = np.random.default_rng(seed), np.concatenate([[0], np.cumsum(sizes)]).astype(int).tolist()
    inserted, deleted = offsets[:-1], offsets[:-1]
    book: list[Step] = []
    for turn in range(1, _ROUNDS + 1):
        until = [start + size * turn // _ROUNDS for start, size in zip(offsets, sizes, strict=False)]
        for low, high in zip(inserted, until, strict=True):
            book += [Step("insert", low, high), Step("search")]
        gone = [
            low + int(random.uniform(0, _MOST_DELETED) * (high - low)) for low, high in zip(deleted, until, strict=True)
        ]
        for low, high in zip(deleted, gone, strict=True):
            book += [Step("delete", low, high), Step("search")]
        inserted, deleted = until, gone
    return book


def _as_they_are(vectors: Floats, steps: int, seed: int) -> tuple[Ints, list[Step]]:
    return np.random.default_rng(seed).permutation(len(vectors)), sliding(len(vectors), steps)


def _drifting(vectors: Floats, steps: int, seed: int) -> tuple[Ints, list[Step]]:
    """A sliding window over vectors in the order of their longest axis: all that is searched is new in the end."""
    sample = vectors[np.random.default_rng(seed).permutation(len(vectors))[:_SAMPLED]]
    axis = np.linalg.eigh(np.cov(sample.T))[1][:, -1]
    return np.argsort(vectors @ axis.astype(np.float32), kind="stable"), sliding(len(vectors), steps)


def _in_clusters(vectors: Floats, steps: int, seed: int) -> tuple[Ints, list[Step]]:
    clusters = max(2, steps // (2 * _ROUNDS))
    sample = vectors[np.random.default_rng(seed).permutation(len(vectors))[:_SAMPLED]]
    trainer = faiss.Kmeans(vectors.shape[1], clusters, seed=seed)
    trainer.train(sample)
    member = trainer.index.search(vectors, 1)[1][:, 0]
    return np.argsort(member, kind="stable"), clustered(np.bincount(member, minlength=clusters).tolist(), seed)


def _expiring(vectors: Floats, steps: int, seed: int) -> tuple[Ints, list[Step]]:
    return np.random.default_rng(seed).permutation(len(vectors)), expiring(len(vectors), steps, seed)


GENERATED: dict[str, Callable[[Floats, int, int], tuple[Ints, list[Step]]]] = {
    "sliding": _as_they_are, "drifting": _drifting, "clustered": _in_clusters, "expiring": _expiring,
}  # fmt: skip
"""By name: from vectors ``[n, d]``, a number of steps and a seed, the order of the vectors, and the runbook."""


def alive(book: Sequence[Step]) -> Iterator[dict[int, int]]:
    """Yield after each step the vector of each id: the plain meaning of a runbook."""
    rows: dict[int, int] = {}
    for step in book:
        if step.operation == "insert":
            rows |= {each: each for each in range(step.start, step.end)}
        for each in range(step.start, step.end) if step.operation == "delete" else ():
            rows.pop(each, None)
        if step.operation == "replace":
            pairs = zip(range(step.tags_start, step.tags_end), range(step.ids_start, step.ids_end), strict=True)
            rows |= dict(pairs)
        yield rows
