"""The account of one search for items: its steps, and a record of each item that it looked at."""

from dataclasses import asdict, dataclass
from typing import Any

from memhier.ann.zoom.search.explanation import WHY_STOPPED

__all__ = ["ItemExplanation", "ItemRecord"]


@dataclass(frozen=True, slots=True)
class ItemRecord:
    """The decisions of one search on one item.

    Attributes
    ----------
    id
        Of the item, an integer or a string.
    listed, estimate
        Its score with every vector moved to the centroid of its list, and as the codes tell it. None where the search
        did not make them, and for an item that waits in DRAM for its commit.
    upper
        The score that the search took it for at most: an estimate widened by the errors of the effort, or a bound that
        holds for certain. None where it had none.
    round
        The submission of reads that brought it, from 1 on; None where it was not read.
    score
        Exact score; None where it was not compared.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from memhier.ann import ItemRecord, MultiVectorIndex
    >>> items = np.random.default_rng(0).normal(size=(400, 6, 16)).astype("float32")
    >>> with MultiVectorIndex.build(tempfile.mkdtemp() + "/index", items, dram="4MiB") as index:
    ...     first = index.explain(items[7, :3], k=3).records[0]
    >>> isinstance(first, ItemRecord), first.id, first.round, first.score > first.listed
    (True, 7, 1, True)
    """

    id: int | str
    listed: float | None
    estimate: float | None
    upper: float | None
    round: int | None
    score: float | None


@dataclass(frozen=True, slots=True)
class ItemExplanation:
    """One search for items, step by step.

    Attributes
    ----------
    lists, probed
        Lists of the index, and lists whose items were looked at.
    items, candidates
        Items of the index, and those with a vector in a list probed.
    estimated, ranked
        Candidates scored by their codes, and items scored exactly.
    pages, rounds
        Pages read for them, and submissions of reads.
    stopped
        Why the search ended: ``"bound"``, ``"all_read"``, ``"max_reads"`` or ``"deadline"``.
    exact
        Whether all items were candidates, by bounds that hold for certain.
    calibrated
        Whether the effort is known to reach the recall asked for.
    kth
        Score of the k-th item found; None where there are fewer.
    records
        An :class:`ItemRecord` for each of 4,096 items, or twice `k` where that is more: those scored exactly or by
        their codes by descending score, then those scored by their lists.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from memhier.ann import MultiVectorIndex
    >>> items = np.eye(8, dtype="float32").reshape(4, 2, 8)
    >>> with MultiVectorIndex.build(tempfile.mkdtemp() + "/index", items, dram="4MiB") as index:
    ...     steps = index.explain(items[2], k=1)
    >>> steps.items, steps.ranked, steps.exact, steps.kth
    (4, 4, True, 2.0)
    """

    lists: int
    probed: int
    items: int
    candidates: int
    estimated: int
    ranked: int
    pages: int
    rounds: int
    stopped: str
    exact: bool
    calibrated: bool
    kth: float | None
    records: list[ItemRecord]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, the records as dicts."""
        return asdict(self)

    def __str__(self) -> str:
        known = (
            "" if self.calibrated else "\nThe recall asked for is not known to be reached: see MultiVectorIndex.tune."
        )
        how = "by bounds that hold for certain" if self.exact else "by estimates and their errors"
        return (
            f"{self.probed} of {self.lists} lists were looked at, with {self.candidates:,} of {self.items:,} items;\n"
            f"{self.estimated:,} were scored by their codes.\n"
            f"{self.ranked:,} were ranked exactly, {how}, in {self.rounds} round{'' if self.rounds == 1 else 's'}: "
            f"{self.pages} pages read.\n"
            f"It stopped as {WHY_STOPPED[self.stopped]}.{known}"
        )
