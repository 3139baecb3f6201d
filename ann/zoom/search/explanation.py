"""The account of one search: its steps, and a record of each candidate."""

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["WHY_STOPPED", "CandidateRecord", "Explanation"]

WHY_STOPPED = {
    "bound": "the bound of every candidate left was beyond the k-th best found",
    "all_read": "every candidate had been read",
    "max_reads": "the pages allowed by max_reads were read",
    "deadline": "the time allowed by deadline_ms was over",
}


@dataclass(frozen=True, slots=True)
class CandidateRecord:
    """The decisions of one search on one vector.

    Attributes
    ----------
    id
        Of the vector, an integer or a string.
    list, page
        Its inverted list, and the page on SSD where it begins, counted through the parts of the index. None for a
        vector that waits in DRAM for its commit: such a vector is compared exactly, without a code.
    lower, estimate
        Of its distance, by its code. The upper bound lies as far above the estimate. Bounds are as wide as the recall
        needs, so a distance may lie below one. None where a bound is unknown, as of a code of ``preview="pq"``, and
        where no code was compared: the vector was found on a page that was read for another.
    admitted
        Whether the bounds left it as a candidate.
    round
        The round of reads that brought its page, from 1 on. None where it was not read: its lower bound was beyond the
        k-th distance, or a limit ended the search. A page brings all of its vectors, those refused as well.
    distance
        Exact distance; None where it was not compared.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from memhier.ann import CandidateRecord, ZoomIndex
    >>> vectors = np.random.default_rng(0).normal(size=(3000, 32)).astype("float32")
    >>> with ZoomIndex.build(tempfile.mkdtemp() + "/index", vectors, dram="4MiB") as index:
    ...     records = index.explain(vectors[7], k=3).records
    >>> first = records[0]
    >>> isinstance(first, CandidateRecord), first.id, first.admitted, first.round, first.distance
    (True, 7, True, 1, 0.0)
    >>> first.lower < first.estimate
    True
    """

    id: int | str
    list: int | None
    page: int | None
    lower: float | None
    estimate: float | None
    admitted: bool
    round: int | None
    distance: float | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """One search, step by step.

    Attributes
    ----------
    lists, probed
        Inverted lists of the index, and lists scanned.
    routed
        Lists that the graph was asked for; the search passed over those between.
    vectors, scanned
        Vectors in the index, and codes compared.
    candidates
        Vectors left by the bounds, which lie `eps` standard errors from an estimate.
    eps
        See above; None where a fixed number of candidates is read.
    ranked, pages, hot_pages, rounds
        Vectors compared exactly, pages read for them unless DRAM held them, hot pages, and rounds of reads.
    stopped
        Why the search ended: ``"bound"``, ``"all_read"``, ``"max_reads"`` or ``"deadline"``.
    calibrated
        Whether the effort is known to reach the recall asked for.
    last_eps
        Where the search went on to look at all lists for everything within the k-th distance found so far, standard
        errors of its bounds for that; None elsewhere. It is one more round, and the records have these bounds.
    threshold
        Distance beyond which a lower bound was refused: the k-th least upper bound, or with `last_eps` the k-th
        distance before the last round. None where it is infinite.
    kth
        Distance of the k-th vector found. A page was read only while some lower bound on it was at most the k-th
        distance so far. None where there are fewer vectors.
    scans
        Number and codes of each list scanned, nearest list first.
    records
        A :class:`CandidateRecord` for each of the 4,096 codes with the least lower bounds (or twice `k`, where that is
        more), least first. Vectors found that are none of these follow: at most `k`.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.ann import ZoomIndex
    >>> vectors = np.arange(20, dtype="float32").reshape(10, 2)
    >>> with ZoomIndex.build(tempfile.mkdtemp() + "/index", vectors, dram="4MiB") as index:
    ...     steps = index.explain([4, 5], k=2)
    >>> steps.vectors, steps.scanned, steps.pages, steps.stopped
    (10, 10, 1, 'all_read')
    >>> [(record.admitted, record.round, record.distance) for record in steps.records if record.id == 2]
    [(True, 1, 0.0)]
    """

    lists: int
    probed: int
    routed: int
    vectors: int
    scanned: int
    candidates: int
    eps: float | None
    ranked: int
    pages: int
    hot_pages: int
    rounds: int
    stopped: str
    calibrated: bool
    last_eps: float | None
    threshold: float | None
    kth: float | None
    scans: list[tuple[int, int]]
    records: list[CandidateRecord]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, the records as dicts."""
        return asdict(self)

    def __str__(self) -> str:
        bounds = "their estimates" if self.eps is None else f"bounds of {self.eps:.2f} standard errors"
        known = "" if self.calibrated else "\nThe recall asked for is not known to be reached: see ZoomIndex.tune."
        last = ""
        if self.last_eps is not None:
            last = (
                f"The last round took all within the k-th distance by bounds of {self.last_eps:.2f} standard errors.\n"
            )
        return (
            f"{self.probed} of {self.lists} lists were scanned ({self.routed} were near enough to be looked at),\n"
            f"{self.scanned:,} of {self.vectors:,} codes compared, and {self.candidates} vectors left by {bounds}.\n"
            f"{self.ranked} were ranked exactly in {self.rounds} round{'' if self.rounds == 1 else 's'}: "
            f"{self.pages} pages read, {self.hot_pages} in DRAM.\n{last}"
            f"It stopped as {WHY_STOPPED[self.stopped]}.{known}"
        )
