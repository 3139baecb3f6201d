"""The schema of samples: named fields of any dtype and shape."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from memhier.arguments import check_int
from memhier.io.page_file import PAGE_BYTES
from memhier.io.read_arguments import empty_rows
from memhier.recsys.replay.product import ProductCodes

__all__ = ["Column", "Columns", "Field", "Schema", "as_array", "check_update"]

Columns = dict[str, NDArray[Any]]
"""Arrays ``[n, *shape]`` by the name of their column."""

# Dtypes of torch's that numpy has not.
_NO_NUMPY = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"})


class Column(NamedTuple):
    """The values of one array of a batch for one sample."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of one sample."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Field:
    """A field of a sample.

    Parameters
    ----------
    dtype
        Of its elements; plain bytes, no objects.
    shape
        Of one sample's value, ``()`` for a number. The first length is None if it differs between samples.
    longest
        The largest first length of a field whose lengths differ.
    mean
        The first length that is expected on average, of a field whose lengths differ. A budget of memory holds as many
        slots as samples of that length, and each sample takes as many bytes as it has, in blocks of 64: if samples
        turn out longer, memory holds fewer; so does storage in bytes. By default `longest`: there is room for that in
        every slot. For a field with a codec of images or zstd: the bytes expected of a value once it is packed.
    mutable
        Whether `feedback` may give it a new value, such as the logits of DER++. The new value stays with the sample.
    codec
        The codec in which both tiers hold it, memory as well, so that a budget of DRAM holds more samples; None for
        plain values. A batch is decoded as it is drawn. For float32: ``"int8"``, four numbers in the bytes of one, off
        by at most 0.5001 / 127 of the value's largest magnitude, if that is 2e-36 or more (the smallest become 0);
        ``"fp16"`` or ``"bf16"``; or `ProductCodes`. The others that `CarouselBuffer` knows, too.

    Examples
    --------
    >>> from memhier.recsys.replay import Field, Schema
    >>> Field("float32", (10,), mutable=True).columns("logits")
    {'logits': Column(dtype=dtype('float32'), shape=(10,))}
    >>> list(Field("uint8", (None,), longest=200).columns("text"))
    ['text', 'text.length']
    >>> Schema({"latent": Field("float32", (8, 8, 32), codec="int8")})
    Schema(latent: float32[8, 8, 32] as int8)
    """

    dtype: DTypeLike
    shape: tuple[int | None, ...] = ()
    longest: int = 0
    mutable: bool = False
    codec: str | ProductCodes | None = None
    mean: int = 0

    def __post_init__(self) -> None:
        dtype = _as_dtype(self.dtype)
        if dtype.hasobject or dtype.itemsize == 0 or dtype.subdtype is not None:
            raise ValueError(f"dtype={dtype}: expected plain bytes of fixed size; give the shape of a value as shape")
        try:
            np.lib.format.dtype_to_descr(dtype)
        except ValueError as error:
            raise ValueError(f"dtype={dtype}: expected members in the order of their names that do not overlap; "
                             "numpy.lib.recfunctions.repack_fields makes such a dtype") from error  # fmt: skip
        object.__setattr__(self, "dtype", dtype)
        shape = self.shape if isinstance(self.shape, tuple) else (self.shape,)
        lengths = shape[1:] if shape[:1] == (None,) else shape
        if not all(isinstance(length, int | np.integer) and length > 0 for length in lengths):
            raise ValueError(f"shape={self.shape!r}: expected positive ints, of which the first may be None")
        object.__setattr__(self, "shape", tuple(None if length is None else int(length) for length in shape))
        if self.varies:
            check_int("longest", self.longest, 1, 2**30)
            object.__setattr__(self, "mean", check_int("mean", self.mean or self.longest, 1, self.longest))
        elif self.longest or (self.mean and self.codec is None):
            raise ValueError(f"longest={self.longest}, mean={self.mean}: only for a field whose first length is None, "
                             f"not {self.shape}")  # fmt: skip
        check_int("mean", self.mean, 0, 2**30)
        if self.varies and self.mutable:
            raise ValueError("mutable=True: a field whose length differs cannot be given a new value")
        if not isinstance(self.codec, str | ProductCodes | None):
            raise TypeError(f"codec={self.codec!r}: expected a name, such as 'int8', or ProductCodes, or None")
        if self.codec == "none":
            object.__setattr__(self, "codec", None)

    @property
    def varies(self) -> bool:
        """Whether its first length differs between samples."""
        return self.shape[:1] == (None,)

    def columns(self, name: str) -> dict[str, Column]:
        """Return its arrays in a batch: its values, and their lengths if these differ."""
        dtype = np.dtype(self.dtype)
        if not self.varies:
            return {name: Column(dtype, tuple(length or 0 for length in self.shape))}
        rest = tuple(length or 0 for length in self.shape[1:])
        lengths = Column(np.dtype(np.int32), ())
        return {name: Column(dtype, (self.longest, *rest)), f"{name}.length": lengths}


class Schema:
    """The fields of a sample by name.

    Parameters
    ----------
    fields
        From a name to a `Field`, a dtype, or a pair of dtype and shape.

    Examples
    --------
    >>> from memhier.recsys.replay import Schema
    >>> schema = Schema({"image": ("uint8", (32, 32, 3)), "task": "int16"})
    >>> schema.sample_bytes, schema
    (3074, Schema(image: uint8[32, 32, 3], task: int16))
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        if not isinstance(fields, Mapping) or not fields:
            raise ValueError(f"schema={fields!r}: expected a dict from names to fields, with at least one")
        self.fields: dict[str, Field] = {_checked_name(name): _as_field(name, value) for name, value in fields.items()}
        self.columns: dict[str, Column] = {}
        for name, field in self.fields.items():
            self.columns |= field.columns(name)
        # Of one sample in memory.
        self.sample_bytes: int = sum(column.bytes for column in self.columns.values())
        # The names of the fields that may be given new values.
        self.mutable: list[str] = [name for name, field in self.fields.items() if field.mutable]

    def check(self, batch: Mapping[str, Any]) -> tuple[int, Columns]:
        """Return the number of samples in a batch and its columns; raise for an unfit batch.

        Parameters
        ----------
        batch
            For every field an array ``[n, *shape]`` of its dtype, or a torch tensor on the CPU; texts may be shorter
            than those of the field. For a field of different lengths, n arrays or bytes objects.

        Raises
        ------
        TypeError, ValueError
            For a field that is missing or unknown, or values of another dtype or shape.
        """
        if not isinstance(batch, dict | Mapping):  # the first is quick
            raise TypeError(f"batch: expected a dict of the fields {list(self.fields)}, got {type(batch).__name__}")
        if set(batch) != set(self.fields):
            raise ValueError(f"batch: expected the fields {list(self.fields)}, got {list(batch)}")
        columns: Columns = {}
        count = -1
        for name, field in self.fields.items():
            if field.varies:
                columns |= _ragged(name, field, batch[name])
            else:
                columns[name] = _check_values(name, field, batch[name])
            if count not in (-1, len(columns[name])):
                raise ValueError(f"batch[{name!r}]: expected {count} samples as in the fields before, got "
                                 f"{len(columns[name])}")  # fmt: skip
            count = len(columns[name])
        return count, columns

    def empty(self, count: int) -> Columns:
        """Return columns for `count` samples, not filled."""
        return {name: _empty(count, column) for name, column in self.columns.items()}

    def encode(self) -> list[Any]:
        """Return the argument of `decode`, for JSON."""
        return [
            [name, np.lib.format.dtype_to_descr(np.dtype(field.dtype)), field.shape, field.longest, field.mutable]
            for name, field in self.fields.items()
        ]

    @property
    def means(self) -> dict[str, int]:
        """The mean lengths of the fields that memory packs into blocks, each value by its own length."""
        return {name: field.mean for name, field in self.fields.items() if field.mean not in (0, field.longest)}

    @property
    def codecs(self) -> dict[str, str]:
        """The names of the codecs of both tiers by field; that of product codes has their digest."""
        chosen = {name: field.codec for name, field in self.fields.items() if field.codec is not None}
        return {name: codec if isinstance(codec, str) else codec.digest for name, codec in chosen.items()}

    @classmethod
    def decode(cls, fields: Sequence[Any], codecs: Mapping[str, str | ProductCodes], means: Mapping[str, int]) -> Self:
        """Return the schema that `encode` described, with codecs for both tiers and mean lengths by field."""
        return cls({
            name: Field(np.lib.format.descr_to_dtype(_tuples(dtype)), tuple(shape), longest, mutable, codecs.get(name),
                        means.get(name, 0))
            for name, dtype, shape, longest, mutable in fields
        })  # fmt: skip

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.text() == other.text()

    def __hash__(self) -> int:
        return hash(self.text())

    def text(self) -> str:
        """Return a text that only equal schemas have."""
        return json.dumps([self.encode(), self.codecs, self.means])

    def __repr__(self) -> str:
        shown = [
            f"{name}: {field.dtype}{list(field.shape) or ''}{f' as {field.codec}' if field.codec else ''}"
            for name, field in self.fields.items()
        ]
        return f"Schema({', '.join(shown)})"


def _check_values(name: str, field: Field, values: Any) -> NDArray[Any]:
    """Return values of a field of fixed size as an array; raise for unfit ones."""
    if type(values) is np.ndarray and values.ndim and values.dtype == field.dtype and values.shape[1:] == field.shape:
        return values
    array, dtype = as_array(f"batch[{name!r}]", values), np.dtype(field.dtype)
    if array.dtype.kind in "SU" and np.can_cast(array.dtype, dtype):
        array = array.astype(dtype, copy=False)  # texts that are all short have a type of their own
    if array.dtype != dtype:
        raise TypeError(f"batch[{name!r}]: expected an array of {field.dtype}, got {array.dtype}; convert it")
    if array.ndim == 0 or array.shape[1:] != field.shape:
        raise ValueError(f"batch[{name!r}]: expected shape [n{''.join(f', {n}' for n in field.shape)}], got "
                         f"{list(array.shape)}")  # fmt: skip
    return array


def check_update(schema: Schema, update: Mapping[str, Any] | None, count: int) -> Columns:
    """Return `count` new values of mutable fields, or raise for unfit ones."""
    values: Columns = {}
    if update is not None and not isinstance(update, Mapping):
        raise TypeError(f"update: expected a dict from mutable fields to their values, got {type(update).__name__}")
    for name, value in (update or {}).items():
        if name not in schema.mutable:
            raise ValueError(f"update: {name!r} is no mutable field; those are {schema.mutable}")
        values[name] = _check_values(name, schema.fields[name], value)
        if len(values[name]) != count:
            raise ValueError(f"update[{name!r}]: expected {count} values as in the batch, got {len(values[name])}")
    return values


def _torch_name(dtype: Any) -> str:
    """Return the name of a dtype of torch's, or of one that only torch has; nothing for any other."""
    name = str(dtype)
    short = name.removeprefix("torch.")
    return short if name != short or short in _NO_NUMPY else ""


def _as_dtype(dtype: Any) -> np.dtype[Any]:
    """Return a dtype of numpy; raise for one of torch, and name the one to use."""
    name = _torch_name(dtype)
    if name in _NO_NUMPY:
        raise TypeError(f"dtype={dtype}: numpy has no such dtype; make the field float32 and pass .float() of a tensor "
                        "(codec={<field>: 'bf16'} keeps 2 bytes of that on SSD, of bfloat16 without loss)")  # fmt: skip
    if name:
        raise TypeError(f"dtype={dtype}: expected one of numpy's, such as {name!r}")
    found: np.dtype[Any] = np.dtype(dtype)
    return found


def as_array(name: str, values: Any) -> NDArray[Any]:
    """Return an array, or a torch tensor that lies as one, in place; raise for any other value."""
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        dtype = _torch_name(getattr(values, "dtype", ""))
        if dtype in _NO_NUMPY:
            raise TypeError(f"{name}: got a tensor of {dtype}, which numpy does not have; convert it, by .float() for "
                            "a field of float32 (codec={<field>: 'bf16'} keeps 2 bytes of that on SSD, of bfloat16 "
                            "without loss)") from error  # fmt: skip
        raise type(error)(f"{name}: cannot be taken as an array: {error}") from error


def _ragged(name: str, field: Field, values: Any) -> Columns:
    """Return values of different lengths padded with zeros, and their lengths."""
    if isinstance(values, bytes | str) or not isinstance(values, Sequence | np.ndarray):
        raise TypeError(f"batch[{name!r}]: expected a list of arrays or bytes, got {type(values).__name__}")
    shape = field.columns(name)[name].shape
    padded: NDArray[Any] = np.zeros((len(values), *shape), field.dtype)
    lengths: NDArray[np.int32] = np.zeros(len(values), np.int32)
    for index, value in enumerate(values):
        there = f"batch[{name!r}][{index}]"
        if isinstance(value, bytes | bytearray) and len(value) % np.dtype(field.dtype).itemsize:
            raise ValueError(f"{there}: {len(value)} bytes are no whole number of {field.dtype}")
        array = np.frombuffer(value, field.dtype) if isinstance(value, bytes | bytearray) else as_array(there, value)
        if array.dtype != field.dtype and array.size:
            encode = "; encode() texts" if array.dtype.kind == "U" else ""
            raise TypeError(f"batch[{name!r}][{index}]: expected an array of {field.dtype}, got {array.dtype}{encode}")
        if array.ndim == 0 or (array.size and array.shape[1:] != shape[1:]) or len(array) > shape[0]:
            expected = ", ".join(["up to " + str(shape[0]), *map(str, shape[1:])])
            raise ValueError(f"batch[{name!r}][{index}]: expected shape [{expected}], got {list(array.shape)}")
        if array.size:
            padded[index, : len(array)] = array
        lengths[index] = len(array)
    return {name: padded, f"{name}.length": lengths}


def _as_field(name: str, value: Any) -> Field:
    if isinstance(value, Field):
        return value
    if isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[1], tuple | int | np.integer):
        return Field(value[0], value[1] if isinstance(value[1], tuple) else (int(value[1]),))
    try:
        if value is None:
            raise TypeError("None is no dtype")  # numpy takes it for float64
        return Field(value)
    except TypeError as error:
        expected = "expected a Field, a dtype, or (dtype, shape)"
        raise TypeError(f"schema[{name!r}]={value!r}: {expected}; {error}") from error


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"schema: field {name!r}: expected a name such as 'image'")
    return name


def _tuples(descr: Any) -> Any:
    """Return the description of a dtype as numpy takes it, of which JSON has made lists."""
    if not isinstance(descr, list):
        return descr
    # A name that has a title is a pair; a member that is an array has a shape as well.
    return [
        (tuple(name) if isinstance(name, list) else name, _tuples(kind), *map(tuple, shape))
        for name, kind, *shape in descr
    ]


def _empty(count: int, column: Column) -> NDArray[Any]:
    """Allocate a column; on a page boundary if samples have whole pages, so that reads may land in it."""
    size = column.bytes
    if size < PAGE_BYTES:
        return np.empty((count, *column.shape), column.dtype)
    return empty_rows(count, size).reshape(-1).view(column.dtype).reshape(count, *column.shape)
