"""The measurements of a build: the effort of each way, and the fastest way for each size of batch."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypeAlias

from memhier.ann.decoder.engine.engine import ALL_DIRECTIONS, CERTIFY_LIMIT, NO_WALK, Coarse, Effort, Walk

__all__ = ["FAR_PROBES", "HEAD", "METHODS", "WAYS", "Choices", "Method", "Settings"]

Method: TypeAlias = Literal["auto", "graph", "preview", "screen", "full"]
Choices: TypeAlias = tuple[tuple[int, Method], ...]
METHODS: tuple[Method, ...] = ("auto", "graph", "preview", "screen", "full")
WAYS = METHODS[1:]
HEAD = 256  # exact rows of a partition function
_MARGIN = 4  # a domain that calibration did not see had up to three times the errors
_SCREENED = 0.5  # the share of the radius within which seeds alone are trusted
FAR_PROBES = 16  # no group is near, so many lend their seeds


@dataclass(frozen=True, slots=True)
class Settings:
    """Plain numbers, kept beside the codes.

    Attributes
    ----------
    k
        How many largest logits the effort was measured for; more take proportionally more effort.
    precision
        Declared: the mean share of the k largest in an answer, and the share of answers that begin with the largest,
        on contexts like the build's.
    preview_limit
        Candidates that the preview ranks exactly.
    coarse_width, survivors
        Leading directions that the preview scans first, and rows of which it then scans all directions. Zero if it
        scans all directions of all rows at once.
    digit_survivors, digit_limit
        Rows that a scan of digits leaves for all directions, and candidates that the preview then ranks exactly; zero
        if it does not scan digits.
    graph_ef, graph_limit, probes
        List length of the walk, candidates that it ranks exactly, and groups that lend their seeds.
    screen_probes, screen_limit
        The same of screening: groups, and candidates ranked exactly.
    radius
        Squared distance from the nearest group's centre beyond which a context is far: neither the seeds nor the
        effort of near contexts are trusted.
    far_ef, far_limit, far_radius
        Effort of the walk for far contexts, up to the squared distance of its measurement; the preview answers contexts
        further away. Zero if the preview answers all far contexts.
    proof_rows, unproven
        Candidates that a proof ranks exactly, in the mean, and the share of contexts without a proof.
    reached
        Precision on held-out contexts, by way: the lower of these two shares.
    choices
        ``(batch, way)`` in ascending order: the fastest way for batches of at least that size.
    ranges
        Ranges of norms of the build's contexts, to compare with the contexts in use; empty without contexts.
    """

    k: int = 10
    precision: float = 0.99
    preview_limit: int = 64
    coarse_width: int = 0
    survivors: int = 0
    graph_ef: int = 64
    graph_limit: int = 32
    probes: int = 4
    screen_probes: int = 2
    screen_limit: int = 32
    radius: float = float("inf")
    far_ef: int = 0
    far_limit: int = 0
    far_radius: float = 0
    proof_rows: int = 64
    unproven: float = 0.0
    reached: dict[str, float] = field(default_factory=dict)
    choices: Choices = ((1, "preview"),)
    ranges: tuple[tuple[float, float], ...] = ()
    digit_survivors: int = 0
    digit_limit: int = 0

    @property
    def asked(self) -> float:
        """Precision asked of held-out contexts: a quarter of the declared errors, as other contexts come less near."""
        return 1 - (1 - self.precision) / _MARGIN

    def scaled(self, limit: int, k: int) -> int:
        """Return the candidates for `k` largest, if `limit` are right for the build's k."""
        return max(k, -(-limit * k // self.k), limit)

    def limit(self, k: int, words: int, least: int = 0) -> int:
        """Return the candidates of a preview for the `k` largest of so many words, at least `least` if there are."""
        return min(words, max(least, self.scaled(self.preview_limit, k)))

    @property
    def candidates_most(self) -> int:
        """The most candidates of an answer with at most the build's k."""
        preview = max(self.preview_limit, self.survivors, self.digit_survivors)
        return max(CERTIFY_LIMIT, HEAD, preview, self.graph_limit, self.far_limit)

    def with_(self, **changes: Any) -> Self:
        """Return settings with some numbers changed."""
        return replace(self, **changes)

    def coarse(self, k: int) -> Coarse:
        """Return the first pass of the preview for `k` largest."""
        return Coarse(self.coarse_width, self.scaled(self.survivors, k)) if self.coarse_width else ALL_DIRECTIONS

    def preview(self, k: int, words: int, digits: bool) -> tuple[int, Coarse]:
        """Return the candidates and the first pass of the preview, by digits if it may."""
        if digits and self.digit_survivors:
            survivors = min(words, self.scaled(self.digit_survivors, k))
            return min(survivors, self.scaled(self.digit_limit, k)), Coarse(0, survivors)
        return self.limit(k, words), self.coarse(k)

    def walk(self, way: str, among: bool = False) -> Walk:
        """Return the effort of the way ``"graph"`` or ``"screen"``; among half of the words, with twice the list.

        Seeds alone are trusted near the centres; contexts between the groups are walked for.
        """
        longer = 2 if among else 1
        near = Effort(self.probes, longer * self.graph_ef, self.graph_limit)
        far = Effort(FAR_PROBES, longer * self.far_ef, self.far_limit) if self.far_ef else NO_WALK
        if way == "graph":
            return Walk(near, self.radius, far, self.far_radius)
        seeds, radius = Effort(self.screen_probes, 0, self.screen_limit), _SCREENED * self.radius
        return Walk(seeds, radius, far, self.far_radius) if self.far_ef else Walk(seeds, radius, near, self.radius)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Return the settings of plain values, as a dictionary of JSON holds them."""
        values["choices"] = tuple((int(least), way) for least, way in values["choices"])
        # Older decoders have none.
        values["ranges"] = tuple((float(low), float(high)) for low, high in values.get("ranges", ()))
        return cls(**values)
