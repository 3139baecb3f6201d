"""The ways to the largest logits, over one set of codes: what the core does in one call, and rows that lie on SSD."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from memhier import backend
from memhier.ann.decoder.answers import Partition, TopK
from memhier.ann.decoder.calibration.settings import ALL_DIRECTIONS, NO_WALK, Coarse, Effort
from memhier.ann.decoder.coding.codes import BlockCodes, RowCodes
from memhier.ann.decoder.coding.graph import Graph
from memhier.ann.decoder.coding.layer import DTYPES, ROUNDING, Floats, OutputLayer, as_floats, check_finite
from memhier.ann.decoder.coding.projection import Projection
from memhier.ann.decoder.coding.tail import close_sums
from memhier.ann.decoder.core.core import new_core

__all__ = ["Codes", "Engine", "ExactRows", "best_of"]

_LOGITS_MOST = 1 << 23  # that a full product holds at a time
_PASS_STATES = 256  # that are answered in one pass over rows on SSD
_BIAS_ROUNDING = 2.0**-23  # of the logit: what adding the bias in single precision may lose

Ints: TypeAlias = npt.NDArray[np.int64]
Answer = TypeVar("Answer", TopK, Partition)


@dataclass(frozen=True, slots=True)
class Codes:
    """What the DRAM view of a layer consists of.

    Attributes
    ----------
    graph
        Links, and seeds by group of contexts; needs `rows`.
    norms
        float32 ``[V]``: upper bounds of the norms of the layer's rows.
    hashes
        uint64 ``[V]``: of the rows, to tell which of them a layer that was trained on has changed.
    """

    projection: Projection
    blocks: BlockCodes
    rows: RowCodes | None
    graph: Graph | None
    norms: Floats
    hashes: npt.NDArray[np.uint64]

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        parts = (self.projection, self.blocks, self.rows, self.graph)
        return self.norms.nbytes + self.hashes.nbytes + sum(part.memory_bytes for part in parts if part is not None)


class ExactRows(Protocol):
    """Exact logits of candidates whose rows do not lie in DRAM."""

    dtype: str

    def logits(self, hidden: Floats, candidates: Ints) -> Floats:
        """Return the logits of ``candidates [n, c]``, minus infinity for -1; one submission of reads."""

    def blocks(self, hidden: Floats) -> Iterator[tuple[int, Floats]]:
        """Yield the logits of all rows, ``[n, b]``, in blocks, each with the number of its first row: one pass."""

    def states_at_once(self, candidates: int) -> int:
        """Return for how many states arrays of so many candidates each are held at a time."""

    def stats(self) -> dict[str, Any]:
        """Return what the reader has done."""

    def close(self) -> None:
        """Release the files."""

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""


class Engine:
    """Answers batches of checked hidden states, float32 ``[n, D]``.

    Parameters
    ----------
    codes
        Of the layer.
    layer
        The layer in DRAM, or where its rows are read from.
    """

    def __init__(self, codes: Codes, layer: OutputLayer | ExactRows) -> None:
        self.codes, self.layer = codes, layer
        self.in_dram = isinstance(layer, OutputLayer)
        projection, blocks, rows, graph = codes.projection, codes.blocks, codes.rows, codes.graph
        words = len(codes.norms)
        exact = None
        if isinstance(layer, OutputLayer):
            weight = layer.weight if layer.dtype != "float16" else layer.weight.view(np.uint16)
            if backend.core is None:
                weight = layer.weight
            exact = (weight, DTYPES.index(layer.dtype), layer.bias, codes.norms)
        self._core = new_core(
            (projection.mean, projection.turn, projection.common, words),
            (blocks.codes, blocks.numbers, blocks.width),
            None if rows is None else (rows.codes, rows.numbers),
            None if graph is None else (graph.links, graph.centres, graph.halves, graph.starts, graph.seeds),
            exact,
        )
        self._words = words
        dimension = len(projection.mean)
        self._per_norm = (dimension + 2) * 2.0**-24
        self._per_logit = ROUNDING[layer.dtype] + _BIAS_ROUNDING
        # Of a logit per squared norm, were what lies outside the width spread evenly over its directions.
        self._variance = 1 / max(1, dimension - blocks.width)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return itself: nothing in it changes."""
        return self

    def __reduce__(self) -> tuple[type[Self], tuple[Codes, OutputLayer]]:
        """Take codes and layer along; the core is made again from them."""
        if not isinstance(self.layer, OutputLayer):
            raise TypeError("an index whose rows lie on SSD cannot be pickled: open its directory where it is needed")
        return type(self), (self.codes, replace(self.layer, owned=True))

    @property
    def memory_bytes(self) -> int:
        """DRAM held besides a layer that the caller owns, in bytes."""
        held = self.codes.memory_bytes + int(self._core.workspace_bytes)
        if isinstance(self.layer, OutputLayer):
            return held + (self.layer.weight.nbytes + self.layer.bias.nbytes if self.layer.owned else 0)
        return held + self.layer.memory_bytes

    def keep(self, calls: int, candidates: int) -> int:
        """Keep what that many calls at a time work in, with so many candidates each; return the bytes of all of it."""
        return self._core.keep(calls=calls, candidates=candidates)

    def preview(self, hidden: Floats, k: int, limit: int, coarse: Coarse = ALL_DIRECTIONS) -> TopK:
        """Scan all codes, or the leading directions of all and all of those that survive; rank the best exactly."""
        if not self.in_dram:
            parts = self._parts(hidden, limit)
            if len(parts) > 1:
                return _joined([self.preview(part, k, limit, coarse) for part in parts])
            rows, _, _, _ = self._candidates(hidden, limit, bounds=False, coarse=coarse)
            return self._rank(hidden, rows, k)
        values, indices = _room(len(hidden), k)
        bad = self._core.preview(hidden=hidden, limit=limit, coarse=coarse, values=values, indices=indices)
        self._check(bad, hidden)
        return TopK(values, indices)

    def certify(self, hidden: Floats, k: int, limit: int) -> TopK:
        """Rank exactly, in descending order of upper bounds, until none left can be among the k largest."""
        if not self.in_dram:
            return self._certify_stored(hidden, k, limit)
        values, indices = _room(len(hidden), k)
        proven = np.empty(len(hidden), np.uint8)
        bad = self._core.preview(
            hidden=hidden, limit=limit, coarse=ALL_DIRECTIONS, values=values, indices=indices,
            rounding=(self._per_norm, self._per_logit), proven=proven,
        )  # fmt: skip
        self._check(bad, hidden)
        return TopK(values, indices, proven.view(np.bool_))

    def partition(
        self, hidden: Floats, k: int, limit: int, *, inverse: float = 1.0, interval: bool = True
    ) -> tuple[TopK, Partition]:
        """Return the largest logits and log Z: `limit` rows exact, the others by their estimates.

        Parameters
        ----------
        inverse
            What logits are multiplied by in Z.
        interval
            Whether the bounds are wanted; they are infinite otherwise, and the estimate takes half the time.
        """
        if not self.in_dram:
            return self._partition_stored(hidden, k, limit, inverse)
        found = np.empty((len(hidden), 3))
        values, indices = _room(len(hidden), k)
        bad = self._core.preview(
            hidden=hidden, limit=limit, coarse=ALL_DIRECTIONS, values=values, indices=indices,
            rounding=(self._per_norm, _BIAS_ROUNDING), partition=found, interval=interval, inverse=inverse,
            variance=self._variance,
        )  # fmt: skip
        self._check(bad, hidden)
        return TopK(values, indices), Partition(found[:, 0], found[:, 1], found[:, 2])

    def walk(
        self,
        hidden: Floats,
        k: int,
        near: Effort,
        radius: float = float("inf"),
        far: Effort = NO_WALK,
        far_radius: float = 0,
        *,
        away: Floats | None = None,
        looked: Ints | None = None,
    ) -> TopK:
        """Walk the graph from the seeds of the nearest groups; a list of none looks at the seeds alone.

        Parameters
        ----------
        near, radius, far, far_radius
            Effort up to a squared distance from the nearest group's centre, and from there up to another. States yet
            further away, and those that a walk found too little for, come with -1 as their last words.
        away, looked
            Filled, where given and rows lie in DRAM, with those distances, float32 ``[n]``, and how many rows were
            looked at, int64 ``[n]``.
        """
        wanted = k if self.in_dram else max(near.limit, far.limit)
        parts = self._parts(hidden, wanted)
        if len(parts) > 1:
            return _joined([self.walk(part, k, near, radius, far, far_radius) for part in parts])
        values, indices = _room(len(hidden), wanted)
        bad = self._core.walk(
            hidden=hidden, near=near, radius=radius, far=far, far_radius=far_radius, values=values, indices=indices,
            distances=away, tally=looked,
        )  # fmt: skip
        self._check(bad, hidden)
        return TopK(values, indices) if self.in_dram else self._rank(hidden, indices, k)

    def full(self, hidden: Floats, k: int) -> TopK:
        """The full product, and a selection from it; of so many states at a time that their logits stay few."""
        step = max(1, _LOGITS_MOST // self._words) if self.in_dram else _PASS_STATES
        if len(hidden) > step:
            return _joined([self.full(part, k) for part in _split(hidden, step)])
        if self.in_dram or 4 * k > self._words:
            return largest_of(self.all_logits(hidden), k)
        values, indices = np.empty((len(hidden), 0), np.float32), np.empty((len(hidden), 0), np.int64)
        for start, logits in self.logit_blocks(hidden):
            block = largest_of(logits, min(k, logits.shape[1]))
            values, indices = np.hstack([values, block.values]), np.hstack([indices, block.indices + start])
            best = best_of(values, indices, k)
            values, indices = best.values, best.indices
        return TopK(values, indices)

    def all_logits(self, hidden: Floats) -> Floats:
        """Return all logits, float32 ``[n, V]``."""
        if isinstance(self.layer, OutputLayer):
            check_finite(hidden)
            return self.layer.logits(hidden)
        out = np.empty((len(hidden), self._words), np.float32)
        for start, logits in self.logit_blocks(hidden):
            out[:, start : start + logits.shape[1]] = logits
        return out

    def logit_blocks(self, hidden: Floats) -> Iterator[tuple[int, Floats]]:
        """Yield all logits, float32 ``[n, b]``, in blocks of rows, each with the number of its first row."""
        check_finite(hidden)
        if not isinstance(self.layer, OutputLayer):
            yield from self.layer.blocks(hidden)
            return
        for start, rows in self.layer.blocks():
            yield start, hidden @ rows.T + self.layer.bias[start : start + len(rows)]

    def close(self) -> None:
        """Release the files of rows on SSD."""
        if not isinstance(self.layer, OutputLayer):
            self.layer.close()

    def logits_of(self, hidden: Floats, rows: Ints) -> Floats:
        """Return exact logits of given rows ``[n, c]``."""
        layer = self.layer
        if not isinstance(layer, OutputLayer):
            return layer.logits(hidden, rows)
        weight = as_floats(layer.weight[rows.reshape(-1)], layer.dtype).reshape(*rows.shape, layer.shape[1])
        logits: Floats = np.einsum("ncd,nd->nc", weight, hidden) + layer.bias[rows]
        return logits

    def error_of(
        self, hidden: Floats, rows: Ints, logits: Floats, per_logit: float = _BIAS_ROUNDING
    ) -> npt.NDArray[np.float64]:
        """Return what exact logits of ``rows [n, c]`` may be wrong by, zero where there is no row."""
        norms = np.linalg.norm(hidden.astype(np.float64), axis=1)[:, None] * self.codes.norms[rows]
        return np.where(rows >= 0, self._per_norm * norms + per_logit * np.abs(np.where(rows >= 0, logits, 0)), 0)

    def _candidates(
        self,
        hidden: Floats,
        limit: int,
        *,
        bounds: bool,
        coarse: Coarse = ALL_DIRECTIONS,
        partition: bool = False,
        inverse: float = 1.0,
    ) -> tuple[Ints, Floats, Floats, npt.NDArray[np.float64]]:
        rows, keys, left = _candidate_room(len(hidden), limit)
        sums = np.empty((len(hidden), 4))
        wanted = sums if partition else None
        bad = self._core.candidates(
            hidden=hidden, coarse=coarse, rows=rows, keys=keys, left=left, bounds=bounds, sums=wanted,
            inverse=inverse, variance=self._variance,
        )  # fmt: skip
        self._check(bad, hidden)
        return rows, keys, left, sums

    def _rank(self, hidden: Floats, rows: Ints, k: int) -> TopK:
        assert not isinstance(self.layer, OutputLayer)
        return best_of(self.layer.logits(hidden, rows), rows, k)

    def _certify_stored(self, hidden: Floats, k: int, limit: int) -> TopK:
        """One submission for the `limit` highest bounds; proven is what none of the others can reach."""
        assert not isinstance(self.layer, OutputLayer)
        parts = self._parts(hidden, limit)
        if len(parts) > 1:
            return _joined([self._certify_stored(part, k, limit) for part in parts])
        rows, _, left, _ = self._candidates(hidden, limit, bounds=True)
        logits = self.layer.logits(hidden, rows)
        order = np.lexsort((rows, -logits), axis=1)
        rows, logits = np.take_along_axis(rows, order, 1), np.take_along_axis(logits, order, 1)
        error = self.error_of(hidden, rows, logits, self._per_logit)
        least = logits[:, k - 1] - error[:, k - 1]
        proven = (left < least) & (logits[:, k:] + error[:, k:] < least[:, None]).all(1)
        return TopK(logits[:, :k].copy(), rows[:, :k].copy(), proven)

    def _partition_stored(self, hidden: Floats, k: int, limit: int, inverse: float) -> tuple[TopK, Partition]:
        assert not isinstance(self.layer, OutputLayer)
        parts = self._parts(hidden, limit)
        if len(parts) > 1:
            found = [self._partition_stored(part, k, limit, inverse) for part in parts]
            return _joined([top for top, _ in found]), _joined([each for _, each in found])
        rows, keys, _, sums = self._candidates(hidden, limit, bounds=False, partition=True, inverse=inverse)
        logits = self.layer.logits(hidden, rows)
        error = self.error_of(hidden, rows, logits)
        codes, estimates = self.codes, keys[:, :, 1]
        z = close_sums(
            codes.projection, codes.blocks, hidden, rows, estimates, logits, error, sums, inverse, self._variance
        )
        return best_of(logits, rows, k), z

    def _parts(self, hidden: Floats, candidates: int) -> list[Floats]:
        """Return the states, cut where their candidates would take more DRAM than there is for rows on SSD."""
        if isinstance(self.layer, OutputLayer):
            return [hidden]
        return _split(hidden, self.layer.states_at_once(candidates))

    def _check(self, bad: int, hidden: Floats) -> None:
        if bad >= 0:
            check_finite(hidden[: bad + 1])


def _split(hidden: Floats, step: int) -> list[Floats]:
    return [hidden[start : start + step] for start in range(0, max(1, len(hidden)), step)]


def _joined(answers: list[Answer]) -> Answer:
    """Return answers about parts of a batch as one about all of it."""
    kind = type(answers[0])
    names = [name for name in kind.__dataclass_fields__ if getattr(answers[0], name) is not None]
    return kind(**{name: np.concatenate([getattr(each, name) for each in answers]) for name in names})


def _room(count: int, k: int) -> tuple[Floats, Ints]:
    return np.empty((count, k), np.float32), np.empty((count, k), np.int64)


def _candidate_room(count: int, limit: int) -> tuple[Ints, Floats, Floats]:
    return np.empty((count, limit), np.int64), np.empty((count, limit, 2), np.float32), np.empty(count, np.float32)


def largest_of(logits: Floats, k: int) -> TopK:
    """Return the k largest of all logits ``[n, V]``."""
    words = logits.shape[1]
    if k == words:
        return best_of(logits, np.broadcast_to(np.arange(words), logits.shape), k)
    rows = np.argpartition(-logits, k, axis=1)[:, :k]
    return best_of(np.take_along_axis(logits, rows, 1), rows, k)


def best_of(logits: Floats, rows: Ints, k: int) -> TopK:
    """Return the k largest, the smaller row first at equal ones."""
    order = np.lexsort((rows, -logits), axis=1)[:, :k]
    return TopK(np.take_along_axis(logits, order, 1), np.take_along_axis(rows, order, 1))
