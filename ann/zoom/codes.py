"""Codes of a few bits a dimension with a bound on the error of every distance.

RaBitQ (Gao and Long, SIGMOD 2024) keeps the sign of every rotated dimension, its extension (Gao et al., SIGMOD 2025)
several bits of each. Here dimensions get 8, 4, 2, 1 or no bits by their share of the variance (as in SAQ, Li et al.,
2025), so that any number of bytes can be used: within the principal axes of the residuals, and turned at random among
axes of equal width, so that no single one matters.
"""

import heapq
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["WIDTHS", "CodeBook", "train_codes"]

WIDTHS = (8, 4, 2, 1)
_BLOCK = 8  # dimensions that get their bits together, so that each takes whole bytes; twice as many from 128 on, where
# widths of a few axes would cost a scan more than they tell it
# Of a Gaussian of variance one: the best step of a uniform quantiser with 2^bits levels, and its mean squared error.
_STEP = {1: 1.596, 2: 0.996, 4: 0.335, 8: 0.031}
_ERROR = {0: 1.0, 1: 0.3634, 2: 0.1188, 4: 0.01154, 8: 0.00012}
_SCALES = (0.75, 0.87, 1.0, 1.15, 1.33)  # tried for each vector; more gain less than 2 % of its error
_CELL_BITS = 6
_FEW_ROWS = 4
_HALF_MAX = 65504.0

Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Halves: TypeAlias = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class CodeBook:
    """How residuals, already turned by :attr:`rotation`, become codes.

    Attributes
    ----------
    rotation
        float32 ``[d, d]``, orthonormal: a vector times it stands in the axes of the codes. Or int64 ``[d]``: those axes
        are the vector's own in another order, which takes no DRAM to speak of.
    dimensions
        How many of the first axes get 8, 4, 2 and 1 bits; those after them get none.
    alpha
        float32 ``[coded]``: the step of each axis, relative to the others.
    share
        float32 ``[d]``: each axis' share of the variance of residuals.
    unit
        The root mean square norm of residuals: what radius, factor and error are kept in, so that they suit fp16.
    leading
        float32 ``[d, b]``: the principal axes of residuals, in the axes of the codes, the first one last.
    """

    rotation: Floats | npt.NDArray[np.int64]
    dimensions: tuple[int, int, int, int]
    alpha: Floats
    share: Floats
    unit: float
    leading: Floats

    @property
    def code_bytes(self) -> int:
        """Bytes of a code, without its three fp16 numbers."""
        return sum(-(-count * width // 8) for count, width in zip(self.dimensions, WIDTHS, strict=True))

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return self.rotation.nbytes + self.alpha.nbytes + self.share.nbytes + self.leading.nbytes

    def turn(self, vectors: Floats) -> Floats:
        """Return vectors ``[n, d]`` in the axes of the codes."""
        if self.rotation.ndim == 1:
            return np.ascontiguousarray(vectors[:, self.rotation])
        turned: Floats
        if len(vectors) <= _FEW_ROWS:  # a matrix product would wake BLAS's threads, which costs more than it does
            turned = np.einsum("ij,jk->ik", vectors, self.rotation)
        else:
            turned = vectors @ self.rotation
        return turned

    def cells(self, residuals: Floats) -> Bytes:
        """Return on which sides of the leading axes residuals lie, uint8 ``[n]``.

        In this order the vectors of a list that are near each other tend to share a page.
        """
        sides = residuals @ self.leading > 0
        return np.packbits(sides, axis=1, bitorder="little")[:, 0]

    def encode(self, residuals: Floats) -> tuple[Bytes, Halves]:
        """Return codes uint8 ``[n, code_bytes]`` and fp16 ``[3, n]``: radius, factor and error, in units.

        Parameters
        ----------
        residuals
            float32 ``[n, d]``: turned vectors less the turned centroids of their lists.

        Notes
        -----
        With fields ``u`` and ``v = alpha (u - half)`` the inner product of a residual ``x`` with any ``y`` is estimated
        as ``factor <v, y>``, where ``factor = |x'|^2 / <v, x'>`` for the coded axes ``x'`` (RaBitQ's estimator; axes
        without bits are estimated as zero). Were ``y`` spread over the axes as residuals are, the standard error of
        the estimate would be ``error |y|``.
        """
        coded = len(self.alpha)
        head = residuals[:, :coded]
        squared = np.einsum("ij,ij->i", residuals, residuals)
        energy = np.einsum("ij,ij->i", head, head)
        usual = self.unit * np.sqrt(max(float(self.share[:coded].sum()), 1e-30))
        scale = np.maximum(np.sqrt(energy), 1e-30) / usual * self.unit
        levels = np.repeat(np.float32(2.0) ** np.array(WIDTHS, np.float32), self.dimensions)
        fields = self._round(head / self.alpha / scale[:, None], levels)
        values = (fields - (levels - 1) / 2) * self.alpha
        product = np.einsum("ij,ij->i", values, head)
        with np.errstate(divide="ignore", invalid="ignore"):
            factors = np.where(product > 0, energy / product, 0).astype(np.float32)
        wrong = head - factors[:, None] * values
        error = np.square(wrong) @ self.share[:coded] + np.square(residuals[:, coded:]) @ self.share[coded:]
        numbers = np.stack([np.sqrt(squared), factors, np.sqrt(error)]) / np.float32(self.unit)
        beyond = (numbers > _HALF_MAX).any(axis=0)
        numbers = np.minimum(numbers, _HALF_MAX)
        # Half precision errs as well: by little, but where a code is all but exact, as of one axis, by all there is.
        lost = np.abs(numbers[:2].astype(np.float16) - numbers[:2])
        lost[1] *= product / np.maximum(np.sqrt(energy), np.float32(1e-30))
        numbers[2] = np.sqrt(np.square(numbers[2]) + np.square(lost).sum(axis=0))
        numbers[2] = numbers[2] * np.float32(1 + 2**-10) + np.float32(2**-24)  # so that it is not rounded down
        halves = np.minimum(numbers, _HALF_MAX).astype(np.float16)
        halves[2, beyond] = np.inf  # nothing is known of it: a search has to read it
        return self._pack(fields), halves

    def _round(self, relative: Floats, levels: Floats) -> Bytes:
        """Return the fields of axes in steps ``[n, coded]``, at the scale of each row that errs least."""
        fields = np.zeros(relative.shape, np.uint8)
        least = np.full(len(relative), np.inf, np.float32)
        # The error along each axis weighs as much as queries have along it.
        weight = np.square(self.alpha) * self.share[: len(self.alpha)]
        half, middle = levels / 2, (levels - 1) / 2
        tried, wrong = np.empty_like(relative), np.empty_like(relative)
        for scale in _SCALES:
            np.multiply(relative, np.float32(1 / scale), out=tried)
            np.floor(tried, out=tried)
            tried += half
            np.clip(tried, 0, levels - 1, out=tried)
            np.subtract(tried, middle, out=wrong)
            wrong *= np.float32(scale)
            wrong -= relative
            np.square(wrong, out=wrong)
            error = wrong @ weight
            better = error < least
            fields[better] = tried[better]
            least[better] = error[better]
        return fields

    def _pack(self, fields: Bytes) -> Bytes:
        """Return fields ``[n, coded]`` packed as the native scan unpacks them."""
        packed = np.zeros((len(fields), self.code_bytes), np.uint8)
        for start, first, width, dimensions in chunks(self.dimensions):
            columns = -(-dimensions * width // 8)
            for field in range(8 // width):
                low = field * columns
                part = fields[:, first + low : first + min(low + columns, dimensions)]
                packed[:, start : start + part.shape[1]] |= part << np.uint8(field * width)
        return packed


def chunks(dimensions: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
    """Return ``(first byte, first dimension, width, dimensions)`` of each chunk of up to 64 bytes of a code."""
    found = []
    byte = axis = 0
    for count, width in zip(dimensions, WIDTHS, strict=True):
        end = axis + count
        while axis < end:
            taken = min(end - axis, 64 * 8 // width)
            found.append((byte, axis, width, taken))
            byte += -(-taken * width // 8)
            axis += taken
    return found


def train_codes(
    residuals: Floats, code_bytes: int, seed: int, *, rotate: bool = True, least: float = 1e-30
) -> CodeBook:
    """Return the code book of at most `code_bytes` bytes for residuals like these.

    Parameters
    ----------
    residuals
        float32 ``[s, d]``, a sample.
    code_bytes
        At least 1.
    seed
        Chooses the rotation.
    rotate
        False where ``4 d^2`` bytes of DRAM are too many for a rotation.
    least
        The least root mean square norm that residuals have, whatever those of the sample: the unit of the numbers.
    """
    dimension = residuals.shape[1]
    if not rotate:
        return _order_axes(residuals, code_bytes, least)
    covariance = residuals.T.astype(np.float64) @ residuals / len(residuals)
    variance, axes = np.linalg.eigh(covariance)
    variance, axes = np.maximum(variance[::-1], 0), axes[:, ::-1]
    total = float(variance.sum())
    share = variance / total if total > 0 else np.full(dimension, 1 / dimension)
    first = axes[:, :_CELL_BITS]
    widths = _assign_widths(share, code_bytes)
    order = np.argsort(-widths, kind="stable")
    axes, share, widths = axes[:, order], share[order], widths[order]
    random = np.random.default_rng([seed, 2])
    rotation = axes.copy()
    turned = share.copy()
    alpha: list[npt.NDArray[np.float64]] = []
    for width in (*WIDTHS, 0):
        group = np.flatnonzero(widths == width)
        if not len(group):
            continue
        turn, _ = np.linalg.qr(random.normal(size=(len(group), len(group))))
        rotation[:, group] = axes[:, group] @ turn
        turned[group] = share[group].mean()
        if width:
            alpha.append(np.full(len(group), _STEP[width] * max(turned[group[0]], 1e-12) ** 0.5))
    return CodeBook(
        np.ascontiguousarray(rotation, dtype=np.float32),
        _counts(widths),
        np.concatenate(alpha).astype(np.float32),
        turned.astype(np.float32),
        max(total**0.5, least),
        _leading(rotation.T @ first),
    )


def _order_axes(residuals: Floats, code_bytes: int, least: float) -> CodeBook:
    """Return a code book of the vectors' own axes, those of the greatest variance first."""
    variance = np.square(residuals, dtype=np.float64).mean(axis=0)
    order = np.argsort(-variance, kind="stable")
    total = float(variance.sum())
    share = variance[order] / total if total > 0 else np.full(len(variance), 1 / len(variance))
    widths = _assign_widths(share, code_bytes)
    regroup = np.argsort(-widths, kind="stable")
    share, widths = share[regroup], widths[regroup]
    steps = np.array([_STEP[int(width)] for width in widths[widths > 0]])
    alpha = steps * np.sqrt(np.maximum(share[: len(steps)], 1e-12))
    first = np.eye(len(share))[:, np.argsort(-share, kind="stable")[:_CELL_BITS]]
    return CodeBook(
        order[regroup],
        _counts(widths),
        alpha.astype(np.float32),
        share.astype(np.float32),
        max(total**0.5, least),
        _leading(first),
    )


def _leading(first: npt.NDArray[np.float64]) -> Floats:
    """Return axes, the first one last, so that its side is the highest bit of a cell."""
    return np.ascontiguousarray(first[:, ::-1], dtype=np.float32)


def _counts(widths: npt.NDArray[np.int64]) -> tuple[int, int, int, int]:
    eight, four, two, one = (int((widths == width).sum()) for width in WIDTHS)
    return eight, four, two, one


def _assign_widths(share: npt.NDArray[np.float64], code_bytes: int) -> npt.NDArray[np.int64]:
    """Return the bits of each axis: the next go where they lower the error most, by blocks of axes."""
    steps = (0, *WIDTHS[::-1])
    step = _BLOCK if len(share) < 128 or code_bytes == 1 else 2 * _BLOCK
    blocks = [slice(at, at + step) for at in range(0, len(share), step)]
    widths = np.zeros(len(share), np.int64)
    left = code_bytes

    def gain(block: int, step: int) -> float:
        weight = float(share[blocks[block]].sum())
        return weight * (_ERROR[steps[step]] - _ERROR[steps[step + 1]]) / (steps[step + 1] - steps[step])

    waiting = [(-gain(block, 0), block, 0) for block in range(len(blocks))]
    heapq.heapify(waiting)
    while waiting and left > 0:
        _, block, step = heapq.heappop(waiting)
        size = len(share[blocks[block]])
        cost = -(-size * steps[step + 1] // 8) - -(-size * steps[step] // 8)
        if cost > left:
            continue
        left -= cost
        widths[blocks[block]] = steps[step + 1]
        if step + 2 < len(steps):
            heapq.heappush(waiting, (-gain(block, step + 1), block, step + 1))
    return widths
