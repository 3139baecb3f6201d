"""The interface of an engine, which finds largest logits from the codes and exact rows of one layer."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.allowed import Allowed
from memhier.ann.decoder.answers import Partition, TopK
from memhier.ann.decoder.coding.view import Codes
from memhier.ann.decoder.engine.draws import DrawRequest
from memhier.ann.decoder.engine.envelope import AS_IS, Envelope, Shape
from memhier.ann.decoder.layer import Floats, Ints, OutputLayer

__all__ = ["ALL_DIRECTIONS", "CERTIFY_LIMIT", "NO_WALK", "Coarse", "Completion", "Effort", "Engine", "Walk"]

Completion: TypeAlias = Callable[[Floats, int, Allowed | None, TopK], TopK]

CERTIFY_LIMIT = 2048  # candidates of a proof


class Coarse(NamedTuple):
    """The first pass of a scan: the leading `width` directions of all rows, of which `survivors` are scanned whole.

    With survivors but no width it scans the digits of all rows; if these are all candidates, there is no second pass.
    """

    width: int
    survivors: int


ALL_DIRECTIONS = Coarse(0, 0)


class Effort(NamedTuple):
    """The effort of a walk: groups that lend their seeds, list length (0: seeds alone), candidates ranked exactly."""

    probes: int
    ef: int
    limit: int


NO_WALK = Effort(0, 0, 0)


class Walk(NamedTuple):
    """The effort of a walk by the squared distance of a state from the nearest group's centre.

    Attributes
    ----------
    near, radius
        Effort up to that distance.
    far, far_radius
        Effort from there up to another distance. States further away get no walk.
    """

    near: Effort
    radius: float = float("inf")
    far: Effort = NO_WALK
    far_radius: float = 0


class Engine(Protocol):
    """Answers batches of hidden states, float32 ``[n, D]``. Raises ValueError for numbers that are not finite.

    Where `allowed` is given, an answer holds none but these words, and -1 with minus infinity where they are fewer.
    """

    codes: Codes

    @property
    def layer(self) -> OutputLayer | None:
        """The layer, if its rows lie in DRAM."""

    @property
    def memory_bytes(self) -> int:
        """DRAM held besides a layer that the caller owns, in bytes."""

    def keep(self, candidates: int) -> int:
        """Keep the workspaces of usual calls, of so many candidates each; return the bytes of all workspaces."""

    def preview(
        self, hidden: Floats, k: int, limit: int, coarse: Coarse = ALL_DIRECTIONS, allowed: Allowed | None = None
    ) -> TopK:
        """Scan the codes of all rows and rank the `limit` best exactly."""

    def certify(self, hidden: Floats, k: int, limit: int, allowed: Allowed | None = None) -> TopK:
        """Rank candidates of the highest upper bounds exactly; say of each state if that proves its answer."""

    def partition(
        self, hidden: Floats, k: int, limit: int, *, inverse: float = 1.0, interval: bool = True,
        allowed: Allowed | None = None,
    ) -> tuple[TopK, Partition]:  # fmt: skip
        """Return the largest logits, and log Z from `limit` exact logits and estimates of all others.

        Parameters
        ----------
        inverse
            Multiplies logits in Z.
        interval
            False lets the engine leave the bounds infinite, which takes half the time.
        """

    def envelope(self, hidden: Floats, limit: int, shape: Shape = AS_IS, out: Ints | None = None) -> Envelope:
        """Return the exact logits of the `limit` highest bounds, and the sum of exp of all others.

        Parameters
        ----------
        shape
            The change of logits before their exp.
        out
            Rows ``[n, c]`` to leave out, each once; -1 for none.
        """

    def draw(self, hidden: Floats, request: DrawRequest) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Draw a word for each state, or -1; say of each if it is the draw, or else only if the truncation keeps it."""

    def walk(
        self, hidden: Floats, k: int, walk: Walk, allowed: Allowed | None = None, *, complete: Completion | None = None
    ) -> TopK:
        """Walk the graph from the seeds of the nearest groups.

        A state beyond both radii, or with too few rows found, has -1 as its last words. The walk passes through words
        that are not allowed; a state has no answer at all if its list holds fewer allowed words than it ranks exactly.
        If there is such a state, `complete` makes the answer, from hidden states, k, allowed words and this one.
        """

    def listed(self, hidden: Floats, k: int, allowed: Allowed, *, prove: bool = False) -> TopK:
        """Compute the logits of the allowed words alone; `prove`: say if rounding cannot change an answer."""

    def full(self, hidden: Floats, k: int) -> TopK:
        """Compute the full product and return the largest logits."""

    def all_logits(self, hidden: Floats) -> Floats:
        """Return all logits, float32 ``[n, V]``."""

    def logit_blocks(self, hidden: Floats) -> Iterator[tuple[int, Floats]]:
        """Yield all logits, float32 ``[n, b]``, in blocks of rows, each with the number of its first row."""

    def logits_of(self, hidden: Floats, rows: Ints) -> Floats:
        """Return the exact logits of given rows ``[n, c]``."""

    def stats(self) -> dict[str, Any]:
        """Return the counts of the reader of stored rows; nothing if the rows lie in DRAM."""

    def close(self) -> None:
        """Release the files of stored rows."""
