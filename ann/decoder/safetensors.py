"""Tensors in .safetensors files, one or several shards, mapped into memory instead of copied."""

import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.errors import CorruptionError, FormatError
from memhier.fields import decode_json, integer, mapping, record, row, sequence, text
from memhier.io.outside import reading

__all__ = ["StoredTensor", "find_tensors"]

# Carriers: NumPy has no bfloat16.
_CARRIERS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_LENGTH = struct.Struct("<Q")
_HEADER_MOST = 100 << 20  # the format's own limit, and a fair one for an index of shards
_METADATA = "__metadata__"
_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"

_TENSOR = record({
    "dtype": text(r"[A-Z0-9_]{1,16}"), "shape": sequence(integer(0, 2**48), 0, 32),
    "data_offsets": row(integer(0, 2**62), integer(0, 2**62)),
})  # fmt: skip
_SHARDS = record({"weight_map": mapping(text(r"(?!\.)[^/\\\0]{1,255}"))})  # names beside the index, and no other place


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, as its header describes it.

    Attributes
    ----------
    path
        The file.
    name
        Of the tensor.
    kind
        Its dtype in the words of the format, such as ``"BF16"``.
    shape
        Lengths of its axes.
    start, stop
        Bytes in the file.
    """

    path: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def dtype(self) -> str:
        """The dtype in the words of a layer, such as bfloat16; one that no layer has in the words of the format."""
        return _NAMES.get(self.kind, self.kind)

    def map(self) -> npt.NDArray[Any]:
        """Return the numbers: a private map of the file, which the system reads page by page and may drop again.

        bfloat16 comes as uint16. Writing to the array changes this process's copy of a page, never the file. The file
        must keep its length as long as the array lives.

        Raises
        ------
        TypeError
            For another dtype than F32, F16 and BF16, such as a quantised one.
        FormatError
            If the numbers do not lie at a multiple of their size.
        """
        if self.kind not in _CARRIERS:
            raise TypeError(f"{self.path}: tensor {self.name!r} is {self.kind}: expected F32, F16 or BF16")
        carrier = _CARRIERS[self.kind]
        if self.stop - self.start != prod(self.shape) * carrier.itemsize:
            raise FormatError(
                f"{self.path}: tensor {self.name!r} has {self.stop - self.start} bytes, which {self.kind} of shape "
                f"{list(self.shape)} does not have"
            )
        if self.start % carrier.itemsize:
            raise FormatError(
                f"{self.path}: tensor {self.name!r} begins at byte {self.start}: expected a multiple of "
                f"{carrier.itemsize}; a copy that the package safetensors writes begins there"
            )
        if self.start == self.stop:
            return np.zeros(self.shape, carrier)
        with reading(self.path):
            numbers: npt.NDArray[Any] = np.memmap(self.path, carrier, "c", self.start, self.shape)
        return numbers


def find_tensors(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Return all tensors of a model by name.

    Parameters
    ----------
    path
        A .safetensors file; an index of shards, ``*.index.json``, whose files lie beside it; or the folder of a model.

    Raises
    ------
    FileNotFoundError
        If there is no such file, or a shard is missing.
    FormatError, CorruptionError
        If a file is no .safetensors file, is damaged, or lacks a tensor that the index places in it.
    """
    place = Path(path)
    if place.is_dir():
        place = next((each for name in (_INDEX, _ONE_FILE) if (each := place / name).exists()), place / _ONE_FILE)
    if place.suffix != ".json":
        return _tensors_of(place)
    if place.stat().st_size > _HEADER_MOST:
        raise FormatError(f"{place}: has {place.stat().st_size} bytes: expected an index of shards")
    shards: dict[str, str] = decode_json(place.read_bytes(), place, _SHARDS)["weight_map"]
    found = {name: _tensors_of(place.parent / name) for name in sorted(set(shards.values()))}
    for name, shard in shards.items():
        if name not in found[shard]:
            raise CorruptionError(f"{place}: places tensor {name!r} in {shard}, which does not hold it")
    return {name: found[shard][name] for name, shard in shards.items()}


def _tensors_of(path: Path) -> dict[str, StoredTensor]:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_LENGTH.size)
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else size
        first = _LENGTH.size + length
        if length > _HEADER_MOST or first > size:
            raise FormatError(
                f"{path}: no .safetensors file: its header would have {length} bytes, the file has {size}"
            )
        raw = file.read(length)
    header: dict[str, Any] = decode_json(raw, path, mapping(_or_metadata))
    header.pop(_METADATA, None)
    tensors = {}
    for name, about in header.items():
        if "shape" not in about:  # only metadata have none
            raise CorruptionError(f"{path}: no tensor {name!r}, but {about!r:.60}")
        start, stop = (first + offset for offset in about["data_offsets"])
        if not start <= stop <= size:
            raise CorruptionError(f"{path}: tensor {name!r} has bytes {start} to {stop}, the file {size}")
        tensors[name] = StoredTensor(path, name, about["dtype"], tuple(about["shape"]), start, stop)
    return tensors


def _or_metadata(value: Any) -> None:
    """Check a tensor's description, or the free words of ``__metadata__``."""
    (_TENSOR if type(value) is dict and "shape" in value else mapping(text()))(value)
