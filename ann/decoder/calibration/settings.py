"""What a build learned about a layer: how much effort each way takes, and which is fastest for each size of batch."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self, TypeAlias

from memhier.ann.decoder.engine.engine import ALL_DIRECTIONS, CERTIFY_LIMIT, NO_WALK, Coarse, Effort, Walk

__all__ = ["FAR_PROBES", "HEAD", "METHODS", "WAYS", "Choices", "Method", "Settings"]

Method: TypeAlias = Literal["auto", "graph", "preview", "screen", "full"]
Choices: TypeAlias = tuple[tuple[int, Method], ...]
METHODS: tuple[Method, ...] = ("auto", "graph", "preview", "screen", "full")
WAYS = METHODS[1:]
HEAD = 256  # rows of a partition function that are exact
_MARGIN = 4  # measured: a domain that calibration did not see has up to three times the errors
FAR_PROBES = 16  # none of the groups is near, so seeds of many are asked


@dataclass(frozen=True, slots=True)
class Settings:
    """Plain numbers, kept beside the codes.

    Attributes
    ----------
    k
        Largest logits that effort was measured for; more take proportionally more of it.
    precision
        Declared: the mean share of the k largest that an answer has, on contexts like those of the build.
    preview_limit
        Candidates that the preview ranks exactly.
    coarse_width, survivors
        Leading directions that the preview scans of all rows, and rows of which it then looks at all directions. Zero
        where it scans all directions of all rows.
    graph_ef, graph_limit, probes
        The list of the walk, candidates that it ranks exactly, and groups of contexts whose seeds it starts from.
    screen_probes, screen_limit
        Of screening: groups, and candidates ranked exactly.
    radius
        Squared distance from the nearest group's centre beyond which a context counts as far: neither seeds nor the
        effort measured on others are trusted.
    far_ef, far_limit, far_radius
        Of the walk that answers far contexts, up to the squared distance that it was measured at; the preview answers
        what is further. Zero where it answers all far contexts.
    reached
        By way, the precision on contexts that were held out.
    choices
        ``(batch, way)`` in ascending order: the fastest way for batches of at least that size.
    ranges
        Of norms of the contexts of the build, to tell whether those in use are like them; none where there were none.
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
    reached: dict[str, float] = field(default_factory=dict)
    choices: Choices = ((1, "preview"),)
    ranges: tuple[tuple[float, float], ...] = ()

    @property
    def asked(self) -> float:
        """The precision asked of contexts that were held out: a quarter of the errors, since others come less near."""
        return 1 - (1 - self.precision) / _MARGIN

    def scaled(self, limit: int, k: int) -> int:
        """Return the candidates for `k` largest, where `limit` are right for the k of the build."""
        return max(k, -(-limit * k // self.k), limit)

    def limit(self, k: int, words: int, least: int = 0) -> int:
        """Return the candidates of a preview for the `k` largest of so many words, at least `least` if there are."""
        return min(words, max(least, self.scaled(self.preview_limit, k)))

    @property
    def candidates_most(self) -> int:
        """Candidates that any answer of at most the build's k takes."""
        return max(CERTIFY_LIMIT, HEAD, self.preview_limit, self.survivors, self.graph_limit, self.far_limit)

    def with_(self, **changes: Any) -> Self:
        """Return settings with some numbers changed."""
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    def coarse(self, k: int) -> Coarse:
        """Return the first pass of the preview for `k` largest."""
        return Coarse(self.coarse_width, self.scaled(self.survivors, k)) if self.coarse_width else ALL_DIRECTIONS

    def walk(self, way: str) -> Walk:
        """Return the effort of the way ``"graph"`` or ``"screen"``."""
        near = Effort(self.probes, self.graph_ef, self.graph_limit)
        if way == "screen":
            near = Effort(self.screen_probes, 0, self.screen_limit)
        far = Effort(FAR_PROBES, self.far_ef, self.far_limit) if self.far_ef else NO_WALK
        return Walk(near, self.radius, far, self.far_radius)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Return what :meth:`to_json` gave."""
        values["choices"] = tuple((int(least), way) for least, way in values["choices"])
        # Decoders of before had none.
        values["ranges"] = tuple((float(low), float(high)) for low, high in values.get("ranges", ()))
        return cls(**values)
