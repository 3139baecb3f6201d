"""Codes of a few bits a dimension with a bound on the error of every distance.

RaBitQ (Gao and Long, SIGMOD 2024) keeps the sign of every rotated dimension; its extension (Gao et al., SIGMOD 2025)
keeps several bits. Here dimensions get 8, 4, 2, 1 or no bits by their share of the variance (as in SAQ, Li et al.,
2025), so a code may have any number of bytes. The dimensions are the principal axes of the residuals; axes of equal
width are rotated at random, so that no single axis matters.
"""

import heapq
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from memhier import backend
from memhier.io.kernels import METRICS

__all__ = ["UNKNOWN", "WIDTHS", "CodeBook", "bytes_of_step", "chunks", "train_codes"]

WIDTHS = (8, 4, 2, 1)
UNKNOWN = 255
"""The byte of an error that is unknown."""

_BLOCK = 8  # dimensions that get the same bits, so that they take whole bytes
_WIDE = 128  # dimensions from which on twice as many do: a width for a few axes costs a scan more than it tells
# Of a Gaussian of variance one: the best step of a uniform quantiser with 2^bits levels, and its mean squared error.
_STEP = {1: 1.596, 2: 0.996, 4: 0.335, 8: 0.031}
_ERROR = {0: 1.0, 1: 0.3634, 2: 0.1188, 4: 0.01154, 8: 0.00012}
_SCALES = (0.75, 0.87, 1.0, 1.15, 1.33)  # tried for each vector; more scales lower the error by less than 2 %
_MANY_ROWS = 1024  # from which on BLAS's threads pay; fewer queries, from several threads, would wait for them
_TRAINED = 2048  # residuals looked at together
_HALF_MAX, _HALF_LEAST = 65504.0, 2.0**-24
_BYTE = 256  # values of a byte
_OWN_ERRORS = 3.0  # by which estimates for the queries nearest to a vector are wrong at most: a bound of recall 1 has 8

# Room for factors and errors beyond those of the sample: beyond it, a factor is wrong by more, and an error is unknown.
# Errors far below the largest are not told apart.
_FACTOR_ROOM, _ERROR_ROOM, _ERROR_RANGE = 1.1, 4.0, 2.0**-8

Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Shorts: TypeAlias = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class CodeBook:
    """How residuals, already turned by :attr:`rotation`, become codes.

    Attributes
    ----------
    rotation
        float32 ``[d, d]``, orthonormal: it turns vectors into the axes of the codes. Or int64 ``[d]``: the axes of the
        codes are the vector's own in another order, which takes little DRAM.
    dimensions
        The number of axes with 8, 4, 2 and 1 bits, in this order; further axes get none.
    alpha
        float32 ``[coded]``: the step of each axis, relative to the others.
    share
        float32 ``[d]``: each axis' share of the variance of residuals.
    unit
        The root mean square norm of residuals: the unit of radius, factor and error, so that they suit fp16.
    ratios
        int32 ``[4]``: scale of factors, then of errors, in terms of the radius. A byte ``u`` stands for the float with
        the bits ``least + u step``: nearly a logarithm.
    """

    rotation: Floats | npt.NDArray[np.int64]
    dimensions: tuple[int, int, int, int]
    alpha: Floats
    share: Floats
    unit: float
    ratios: npt.NDArray[np.int32]

    @property
    def code_bytes(self) -> int:
        """Bytes of a code, without its numbers."""
        return sum(-(-count * width // 8) for count, width in zip(self.dimensions, WIDTHS, strict=True))

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return self.rotation.nbytes + self.alpha.nbytes + self.share.nbytes

    def product_errors(self) -> tuple[Floats, float]:
        """Return the squared error of each axis in products, float32 ``[d]``, and that of a vector like residuals."""
        error = np.zeros(len(self.share), np.float32)
        widths = np.repeat(WIDTHS, self.dimensions)
        error[: len(widths)] = [_ERROR[int(width)] for width in widths]
        error[len(widths) :] = _ERROR[0]
        error *= self.share
        return error, max(float(error @ self.share), 1e-30)

    def wrongness(self, turned: Floats) -> Floats:
        """Return the standard error of products with queries ``[n, d]``, relative to a query like residuals."""
        error, usual = self.product_errors()
        of_each: Floats = np.sqrt(np.einsum("ij,ij,j->i", turned, turned, error) / np.float32(usual))
        return of_each

    def spread(self, turned: Floats) -> Floats:
        """Return the root mean square product of queries ``[n, d]`` with residuals of length one."""
        of_each: Floats = np.sqrt(np.einsum("ij,ij,j->i", turned, turned, self.share))
        return of_each

    def widened(self, more: int) -> "CodeBook":
        """Return the book for vectors with `more` further axes, which codes ignore."""
        axes = len(self.share)
        rotation: Any = (
            np.concatenate([self.rotation, np.arange(axes, axes + more)])
            if self.rotation.ndim == 1
            else (np.eye(axes + more, dtype=np.float32))
        )
        if self.rotation.ndim == 2:
            rotation[:axes, :axes] = self.rotation
        return replace(self, rotation=rotation, share=np.concatenate([self.share, np.zeros(more, np.float32)]))

    def space(self, metric: int, dimension: int, scale: float) -> Any:
        """Return the map of queries into the axes of the codes as the native core takes it.

        Parameters
        ----------
        metric
            Its number in ``memhier.io.kernels.METRICS``; with ``"ip"`` the book is :meth:`widened`.
        dimension, scale
            Of vectors, and the factor that brings their values near one.
        """
        assert backend.core is not None
        is_order, is_inner = self.rotation.ndim == 1, METRICS[metric] == "ip"
        errors, usual = self.product_errors()
        return backend.core.QuerySpace(
            metric=metric, dimension=dimension, scale=scale,
            matrix=None if is_order else cast(Floats, self.rotation),
            order=cast(npt.NDArray[np.int64], self.rotation) if is_order else None,
            share=self.share if is_inner else None, errors=errors if is_inner else None, usual=usual,
        )  # fmt: skip

    def turn(self, vectors: Floats) -> Floats:
        """Return vectors ``[n, d]`` in the axes of the codes."""
        if self.rotation.ndim == 1:
            return np.ascontiguousarray(vectors[:, self.rotation])
        turned: Floats
        if len(vectors) > _MANY_ROWS:
            turned = vectors @ self.rotation
        elif backend.core is not None:
            turned = np.empty(vectors.shape, np.float32)
            backend.core.turn_rows(
                vectors=np.ascontiguousarray(vectors), matrix=cast(Floats, self.rotation), out=turned
            )
        else:
            turned = np.einsum("ij,jk->ik", vectors, self.rotation)
        return turned

    def encode(self, residuals: Floats, asked: Floats | None = None) -> tuple[Bytes, Shorts]:
        """Return codes uint8 ``[n, code_bytes]`` and numbers uint16 ``[2, n]``; see :meth:`numbers_of`.

        Parameters
        ----------
        residuals
            float32 ``[n, d]``: turned vectors less the turned centroids of their lists.
        asked
            float32 ``[n, d]``: for each vector the query that lies nearest to it, where products are wanted; else the
            residuals.

        Notes
        -----
        With fields ``u`` and ``v = alpha (u - half)`` the inner product of a residual ``x`` with any ``y`` is estimated
        as ``factor <v, y>``, where ``factor = |x'|^2 / <v, x'>`` for the coded axes ``x'`` (RaBitQ's estimator; axes
        without bits are estimated as zero). Were ``y`` spread over the axes as residuals are, the standard error of
        the estimate would be ``error |y|``. A short code may leave out much along its own vector, so that estimates for
        the queries nearest to it err by many such errors. The error of this code is raised until these are 3.
        """
        fields, values, factors = self.fields_of(residuals)
        with np.errstate(over="ignore", invalid="ignore"):  # errors far beyond the unit are unknown
            numbers = self._numbers(residuals / np.float32(self.unit), values, factors / np.float32(self.unit), asked)
        return self.pack(fields), numbers

    def _numbers(self, residuals: Floats, values: Floats, exact: Floats, asked: Floats | None) -> Shorts:
        """Return the numbers of residuals, in units; their codes stand for `values` times a factor."""
        radii = np.sqrt(np.einsum("ij,ij->i", residuals, residuals))
        kept = np.minimum(np.where(radii > 0, np.maximum(radii, _HALF_LEAST), 0), _HALF_MAX).astype(np.float16)
        units = np.maximum(kept.astype(np.float32), np.float32(_HALF_LEAST))
        # Factors are rounded to the nearest, errors up.
        place = (_bits(exact / units) - self.ratios[0]) / self.ratios[1]
        factor = np.clip(np.rint(place), 0, _BYTE - 1).astype(np.int64)
        factors = units * _floats(self.ratios[0] + factor * self.ratios[1])
        head, tail = residuals[:, : len(self.alpha)], residuals[:, len(self.alpha) :]
        wrong = head - factors[:, None] * values
        error = _squares(wrong, self.share[: len(self.alpha)]) + _squares(tail, self.share[len(self.alpha) :])
        own = self._own_errors(np.concatenate([wrong, tail], axis=1), residuals, asked)
        error = np.maximum(error, np.square(own / np.float32(_OWN_ERRORS)))
        # Rounding errs as well: by little, but where a code is all but exact, as of one axis, it is the whole error.
        norms = np.maximum(np.sqrt(np.einsum("ij,ij->i", head, head)), np.float32(1e-30))
        aligned = np.abs(np.einsum("ij,ij->i", values, head)) / norms
        lost = np.square(radii - kept.astype(np.float32)) + np.square((factors - exact) * aligned)
        least = _bits(np.sqrt(error + lost) * np.float32(1 + 2**-10) / units)
        place = np.ceil((least - self.ratios[2]) / self.ratios[3])
        place = np.where((radii > _HALF_MAX) | (place > UNKNOWN), UNKNOWN, np.maximum(place, 0))
        return np.stack([kept.view(np.uint16), (place.astype(np.int64) << 8 | factor).astype(np.uint16)])

    def _own_errors(self, wrong: Floats, residuals: Floats, asked: Floats | None) -> Floats:
        """Return the errors of products with the query that lies nearest to each vector, for a query of length one."""
        lengths = np.linalg.norm(residuals, axis=1) if asked is None else self.wrongness(asked)
        products = np.einsum("ij,ij->i", residuals if asked is None else asked, wrong)
        found: Floats = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
        return found

    def numbers_of(self, numbers: Shorts) -> tuple[Floats, Floats, Floats]:
        """Return radius, factor and error of numbers uint16 ``[2, n]``, float32 ``[n]`` each, in units."""
        radii = np.ascontiguousarray(numbers[0]).view(np.float16).astype(np.float32)
        factor, error = (numbers[1] & 255).astype(np.int64), (numbers[1] >> 8).astype(np.int64)
        factors = radii * _floats(self.ratios[0] + factor * self.ratios[1])
        errors = np.where(error == UNKNOWN, np.inf, radii * _floats(self.ratios[2] + error * self.ratios[3]))
        return radii, factors, errors.astype(np.float32)

    def fields_of(self, residuals: Floats) -> tuple[Bytes, Floats, Floats]:
        """Return the fields of residuals, the values that they stand for, and their factors."""
        head = residuals[:, : len(self.alpha)]
        energy = np.einsum("ij,ij->i", head, head)
        usual = self.unit * np.sqrt(max(float(self.share[: len(self.alpha)].sum()), 1e-30))
        scale = np.maximum(np.sqrt(energy), 1e-30) / usual * self.unit
        levels = np.repeat(np.float32(2.0) ** np.array(WIDTHS, np.float32), self.dimensions)
        fields = self._round(head / self.alpha / scale[:, None], levels)
        values = ((fields - (levels - 1) / 2) * self.alpha).astype(np.float32, copy=False)
        product = np.einsum("ij,ij->i", values, head)
        with np.errstate(divide="ignore", invalid="ignore"):
            factors = np.where(product > 0, energy / product, 0).astype(np.float32)
        return fields, values, factors

    def decode(self, codes: Bytes, numbers: Shorts) -> Floats:
        """Return approximate residuals of codes ``[n, code_bytes]``, in units, on the coded axes ``[n, coded]``."""
        _, factors, _ = self.numbers_of(numbers)
        return (self.values_of(codes) * factors[:, None]).astype(np.float32, copy=False)

    def values_of(self, codes: Bytes) -> Floats:
        """Return the values that codes ``[n, code_bytes]`` stand for, to be multiplied by a factor, ``[n, coded]``."""
        fields = np.empty((len(codes), len(self.alpha)), np.float32)
        for start, first, width, dimensions in chunks(self.dimensions):
            columns = -(-dimensions * width // 8)
            for field in range(8 // width):
                low = field * columns
                taken = max(0, min(columns, dimensions - low))
                part = codes[:, start : start + taken] >> np.uint8(field * width) & np.uint8(2**width - 1)
                fields[:, first + low : first + low + taken] = part
        half = np.repeat((2.0 ** np.array(WIDTHS, np.float32) - 1) / 2, self.dimensions)
        fields -= half
        fields *= self.alpha
        return fields

    def _round(self, relative: Floats, levels: Floats) -> Bytes:
        """Return the fields of axes in steps ``[n, coded]``, at the scale of each row that errs least."""
        fields = np.zeros(relative.shape, np.uint8)
        least = np.full(len(relative), np.inf, np.float32)
        # The error along an axis weighs as much as the share of queries along it.
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

    def pack(self, fields: Bytes) -> Bytes:
        """Return the fields of :meth:`fields_of` ``[n, coded]`` packed as the native scan unpacks them."""
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
    """Train a code book of at most `code_bytes` bytes for residuals like these.

    Parameters
    ----------
    residuals
        float32 ``[s, d]``, a sample.
    code_bytes
        At least 1.
    seed
        Chooses the rotation.
    rotate
        False if ``4 d^2`` bytes of DRAM are too many for a rotation.
    least
        The least unit of the numbers, where the residuals of the sample are shorter.
    """
    dimension = residuals.shape[1]
    if not rotate:
        return _order_axes(residuals, code_bytes, least)
    covariance = np.zeros((dimension, dimension))
    for start in range(0, len(residuals), _TRAINED):
        some = residuals[start : start + _TRAINED].astype(np.float64)
        covariance += some.T @ some
    covariance /= len(residuals)
    variance, axes = np.linalg.eigh(covariance)
    variance, axes = np.maximum(variance[::-1], 0), axes[:, ::-1]
    total = float(variance.sum())
    share = _shares(variance, len(residuals))
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
    book = CodeBook(
        np.ascontiguousarray(rotation, dtype=np.float32), _counts(widths), np.concatenate(alpha).astype(np.float32),
        turned.astype(np.float32), max(total**0.5, least), np.ones(4, np.int32),
    )  # fmt: skip
    return _with_ratios(book, residuals)


def _shares(variance: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.float64]:
    """Return the share of each axis in the variance of `count` residuals.

    No more residuals than axes have none along some of them, where other vectors differ from their codes all the same:
    as many more are taken to lie alike along all axes.
    """
    axes, total = len(variance), float(variance.sum())
    if total <= 0:
        return np.full(axes, 1 / axes)
    known = count / (count + axes) if count <= axes else 1.0
    return known * variance / total + (1 - known) / axes


def _order_axes(residuals: Floats, code_bytes: int, least: float) -> CodeBook:
    """Return a code book of the vectors' own axes, those of the greatest variance first."""
    variance = np.square(residuals, dtype=np.float64).mean(axis=0)
    order = np.argsort(-variance, kind="stable")
    total = float(variance.sum())
    share = _shares(variance[order], len(residuals))
    widths = _assign_widths(share, code_bytes)
    regroup = np.argsort(-widths, kind="stable")
    share, widths = share[regroup], widths[regroup]
    steps = np.array([_STEP[int(width)] for width in widths[widths > 0]])
    alpha = steps * np.sqrt(np.maximum(share[: len(steps)], 1e-12))
    book = CodeBook(
        order[regroup], _counts(widths), alpha.astype(np.float32), share.astype(np.float32), max(total**0.5, least),
        np.ones(4, np.int32),
    )  # fmt: skip
    return _with_ratios(book, residuals)


def _with_ratios(book: CodeBook, residuals: Floats) -> CodeBook:
    """Return the book with scales that suit the factors and errors of a sample of residuals."""
    found = [_relative(book, residuals[start : start + _TRAINED]) for start in range(0, len(residuals), _TRAINED)]
    if not sum(len(error) for _, error in found):
        found = [_relative(book, np.ones((1, residuals.shape[1]), np.float32))]
    factors, error = (np.concatenate(each) for each in zip(*found, strict=True))
    least, most = float(factors.min(initial=1)), float(factors.max(initial=1e-30))
    largest = max(float(error.max()), 2.0**-20)
    smallest = max(float(error.min()), _ERROR_RANGE * largest)
    scales = [
        _scale(least / _FACTOR_ROOM, most * _FACTOR_ROOM, _BYTE - 1),
        _scale(smallest / _ERROR_ROOM, largest * _ERROR_ROOM, UNKNOWN - 1),
    ]
    return replace(book, ratios=np.array(scales, np.int32).ravel())


def _squares(rows: Floats, share: Floats) -> Floats:
    """Return the sums of squares of finite rows, each axis times its share, float32 ``[n]``."""
    with np.errstate(invalid="ignore"):  # kernels of BLAS warn of values that they read beyond short rows
        found: Floats = np.square(rows) @ share
    return found


def _relative(book: CodeBook, residuals: Floats) -> tuple[Floats, Floats]:
    """Return the factors above zero and the errors of residuals, relative to their length; without those of zero."""
    turned = book.turn(residuals)
    norms = np.sqrt(np.einsum("ij,ij->i", turned, turned))
    turned, norms = turned[norms > 0], norms[norms > 0]
    coded = len(book.alpha)
    _, values, factors = book.fields_of(turned)
    wrong = turned[:, :coded] - factors[:, None] * values
    error = _squares(wrong, book.share[:coded]) + _squares(turned[:, coded:], book.share[coded:])
    return factors[factors > 0] / norms[factors > 0], np.sqrt(error) / norms


def _scale(least: float, most: float, steps: int) -> tuple[int, int]:
    """Return the bits of the float `least`, and the step between bits that reaches `most` in so many steps."""
    low, high = _bits(np.array([least, most], np.float32)).tolist()
    return low, max(1, -(-(high - low) // steps))


def _bits(values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the bits of floats of at least 0 as integers, in the same order."""
    return values.astype(np.float32).view(np.int32).astype(np.int64)


def _floats(bits: npt.NDArray[np.int64]) -> Floats:
    return bits.astype(np.int32).view(np.float32)


def _counts(widths: npt.NDArray[np.int64]) -> tuple[int, int, int, int]:
    eight, four, two, one = (int((widths == width).sum()) for width in WIDTHS)
    return eight, four, two, one


def bytes_of_step(dimension: int) -> int:
    """Return by how many bytes, at least, a code of so many axes grows."""
    return 1 if dimension < _WIDE or dimension % (2 * _BLOCK) else 2


def _assign_widths(share: npt.NDArray[np.float64], code_bytes: int) -> npt.NDArray[np.int64]:
    """Return the bits of each axis: each next bit goes to the block of axes where it lowers the error most."""
    steps = (0, *WIDTHS[::-1])
    step = _BLOCK if len(share) < _WIDE or code_bytes == 1 else 2 * _BLOCK
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
