"""An output layer: a row of weights and a bias for each word, as in the model."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.io.kernels import distances
from memhier.shield import check_interrupt

__all__ = [
    "BIAS_ROUNDING", "DTYPES", "LARGEST", "LOGITS_MOST", "ROUNDING", "OutputLayer", "as_floats", "check_finite",
    "check_hidden", "check_layer", "least_error", "logit_error", "norm_rounding",
]  # fmt: skip

DTYPES = ("float32", "float16", "bfloat16")  # in the order of the core's row types
# The largest change of a logit when it is rounded to the layer's dtype, relative: half of the last place.
ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}
BIAS_ROUNDING = 2.0**-23  # of the logit: the loss of adding the bias in single precision
LOGITS_MOST = 1 << 23  # held at a time by a full product

# The largest weight, bias or number of a hidden state: norms and their products stay within single precision.
LARGEST = 1e15

_BLOCK_BYTES = 32 << 20
_FLOAT32 = np.dtype(np.float32)
_ROWS_MOST = 2**31 - 1

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """Weights in DRAM, shared with the caller or owned.

    Attributes
    ----------
    weight
        ``[V, D]``, C-contiguous: float32, float16, or uint16 that holds bfloat16.
    dtype
        One of :data:`DTYPES`.
    bias
        float32 ``[V]``.
    owned
        True for weights that are a copy or come from a file, so that only the layer holds them.
    """

    weight: npt.NDArray[Any]
    dtype: str
    bias: Floats
    owned: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Words and dimension."""
        words, dimension = self.weight.shape
        return words, dimension

    def blocks(self) -> Iterator[tuple[int, Floats]]:
        """Yield all rows as float32, in blocks, each with the number of its first row."""
        step = max(1, _BLOCK_BYTES // (4 * self.shape[1]))
        for start in range(0, self.shape[0], step):
            check_interrupt()
            yield start, as_floats(self.weight[start : start + step], self.dtype)

    def logits(self, hidden: Floats) -> Floats:
        """Return all logits, float32 ``[n, V]``: the full product."""
        words = self.shape[0]
        out = np.empty((len(hidden), words), np.float32)
        if self.dtype != "float32" and len(hidden) == 1:
            # The rows are read once, at half the bytes, and never widened in DRAM.
            distances(hidden, self.weight, "ip", dtype=self.dtype, out=out[0])
            np.subtract(self.bias, out[0], out=out[0])
            return out
        for start, rows in self.blocks():
            np.matmul(hidden, rows.T, out=out[:, start : start + len(rows)])
        out += self.bias
        return out

    def logits_of(self, hidden: Floats, rows: Ints) -> Floats:
        """Return the logits of given rows ``[n, c]``."""
        logits: Floats = np.einsum("ncd,nd->nc", as_floats(self.weight[rows], self.dtype), hidden) + self.bias[rows]
        return logits

    def digest(self) -> str:
        """Return a hash of weights and bias, which tells a layer from another."""
        hasher = hashlib.blake2b(digest_size=16)
        hasher.update(f"{self.dtype} {self.shape}".encode())
        hasher.update(np.ascontiguousarray(self.weight).view(np.uint8).data)
        hasher.update(np.ascontiguousarray(self.bias).view(np.uint8).data)
        return hasher.hexdigest()


def as_floats(rows: npt.NDArray[Any], dtype: str) -> Floats:
    """Return rows of any of the dtypes as float32; float32 itself without a copy."""
    if dtype == "bfloat16":
        return (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return rows.astype(np.float32, copy=False)


def norm_rounding(dimension: int) -> float:
    """Return the loss of a product in single precision, as a share of the product of both norms."""
    return (dimension + 2) * 2.0**-24


def least_error(dtype: str, dimension: int) -> float:
    """Return the loss of any logit, however near to zero, where numbers lie no closer: by rounding, and by products."""
    return 2.0**-25 if dtype == "float16" else dimension * 2.0**-126


def logit_error(
    hidden: Floats, rows: Ints, logits: Floats, norms: Floats, per_logit: float = BIAS_ROUNDING
) -> npt.NDArray[np.float64]:
    """Return bounds of the rounding errors of exact logits of ``rows [n, c]``, zero for row -1.

    Parameters
    ----------
    norms
        float32 ``[V]``: upper bounds of the norms of the layer's rows.
    per_logit
        Rounding as a share of the logit.
    """
    products = np.linalg.norm(hidden.astype(np.float64), axis=1)[:, None] * norms[rows]
    error = norm_rounding(hidden.shape[1]) * products + per_logit * np.abs(np.where(rows >= 0, logits, 0))
    return np.where(rows >= 0, error, 0)


def check_layer(weight: Any, bias: Any, dtype: str | None) -> OutputLayer:
    """Return weights and bias as a layer.

    Raises
    ------
    TypeError, ValueError
        For another shape or dtype, or a number that is not finite; the message names its row.
    """
    try:
        rows = np.asarray(weight)
    except (TypeError, RuntimeError) as error:
        raise _unreadable("weight", weight, error) from error
    if dtype is None and rows.dtype == np.float64:
        with np.errstate(over="ignore"):  # the check of numbers below refuses infinity
            rows = rows.astype(np.float32)
    name = dtype if dtype is not None else str(rows.dtype)
    carrier = np.uint16 if name == "bfloat16" else np.dtype(name) if name in DTYPES else None
    if carrier is None or rows.dtype != carrier:
        raise TypeError(
            f"weight: expected float32, float16, or uint16 with dtype='bfloat16'; got {rows.dtype} with dtype={dtype!r}"
        )
    if rows.ndim != 2 or not 1 <= rows.shape[0] <= _ROWS_MOST or rows.shape[1] < 1:
        raise ValueError(f"weight: expected shape [V, D] with V and D of at least 1, got {list(rows.shape)}")
    with np.errstate(over="ignore"):
        numbers = np.zeros(len(rows), np.float32) if bias is None else np.ascontiguousarray(bias, np.float32)
    if numbers.shape != (len(rows),):
        raise ValueError(f"bias: expected shape [{len(rows)}] as weight has rows, got {list(numbers.shape)}")
    rows = np.ascontiguousarray(rows)
    owned = not isinstance(weight, np.ndarray) or not np.may_share_memory(rows, weight)
    layer = OutputLayer(rows, name, numbers, owned)
    for start, block in layer.blocks():
        if not np.isfinite(block).all():
            row = start + int(np.flatnonzero(~np.isfinite(block).all(1))[0])
            raise ValueError(f"weight[{row}] holds NaN or infinity: expected finite numbers")
        if float(np.abs(block).max()) > LARGEST:
            row = start + int(np.flatnonzero((np.abs(block) > LARGEST).any(1))[0])
            raise ValueError(f"weight[{row}] holds a number beyond {LARGEST:g}, whose square would overflow")
    fits = np.abs(numbers) <= LARGEST
    if not fits.all():
        row = int(np.flatnonzero(~fits)[0])
        raise ValueError(
            f"bias[{row}]={numbers[row]}: expected finite numbers up to {LARGEST:g}; to rule a word out, mask its logit"
        )
    return layer


def _unreadable(name: str, given: Any, error: Exception) -> TypeError:
    """Return the error for a value that NumPy cannot read, such as a tensor of bfloat16."""
    return TypeError(
        f"{name}: expected an array of NumPy, got {type(given).__name__} of {getattr(given, 'dtype', 'no dtype')} "
        f"({error}): of a torch tensor of bfloat16, give weight.detach().view(torch.uint16).numpy() with "
        "dtype='bfloat16' and hidden.float().numpy(), or take TopKSoftmax.from_linear, which takes both as they are"
    )


def check_finite(hidden: Floats) -> None:
    """Refuse hidden states with NaN, infinity or a number beyond LARGEST; the message names its place."""
    bad = np.flatnonzero(~(np.abs(hidden) <= LARGEST).all(1))
    if len(bad):
        at = int(np.flatnonzero(~(np.abs(hidden[bad[0]]) <= LARGEST))[0])
        number = hidden[bad[0], at]
        raise ValueError(
            f"hidden[{bad[0]}, {at}]={number}: expected finite numbers up to {LARGEST:g}; the model itself went wrong"
        )


def check_hidden(name: str, hidden: Any, dimension: int) -> Floats:
    """Return hidden states as C-contiguous float32 ``[n, D]``; one state ``[D]`` becomes a batch of one.

    Raises
    ------
    TypeError, ValueError
        For another dtype or dimension. The core refuses numbers that are not finite, as it reads all of them.
    """
    try:
        states = hidden if type(hidden) is np.ndarray else np.asarray(hidden)
    except (TypeError, RuntimeError) as error:
        raise _unreadable(name, hidden, error) from error
    if states.dtype is _FLOAT32 and states.ndim == 2 and states.shape[1] == dimension:
        return np.ascontiguousarray(states)  # most calls: the rest would take a share of a call for one word
    if states.dtype.kind != "f":
        raise TypeError(f"{name}: expected an array of float32 or float16, got {states.dtype}")
    if states.ndim == 1:
        states = states[None]
    if states.ndim != 2 or states.shape[1] != dimension:
        raise ValueError(f"{name}: expected shape [n, {dimension}] as the layer's rows have, got {list(states.shape)}")
    with np.errstate(over="ignore"):  # the core refuses infinity
        return np.ascontiguousarray(states, np.float32)
