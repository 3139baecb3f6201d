"""The interface of an adapter of a peer.

Adapters run in the peer's own virtual environment, so this package imports nothing but numpy, and no adapter imports
its peer before :meth:`SearchPeer.load` is called.
"""

import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Effort", "Matrix", "SearchPeer", "list_count", "row_blocks", "sub_quantisers", "write_bin"]

Matrix: TypeAlias = npt.NDArray[Any]
Effort: TypeAlias = dict[str, int | float]


class SearchPeer(ABC):
    """One library that searches vectors on SSD, or in DRAM for reference.

    Attributes
    ----------
    name, package
        Its name here, and the distribution that gives its version.
    install
        Arguments of ``pip install``.
    io
        ``"direct"`` bypasses the page cache; ``"buffered"`` and ``"mapped"`` fill it, and are held to the budget by
        giving pages back, at random; ``"none"`` keeps everything in DRAM.
    dtypes
        Element types that it stores; vectors of another type are given as float32.
    batch
        Whether one call takes many queries.
    headroom
        Bytes of address space for stacks and arenas that the cap on memory allows beside the budget.
    traps
        Mistakes that are easily made with it, and this adapter's way around each.
    build_parameters, efforts
        Defaults: how an index is built, and the sweep of search parameters from cheap to thorough.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    install: ClassVar[tuple[str, ...]]
    io: ClassVar[Literal["direct", "buffered", "mapped", "none"]]
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    batch: ClassVar[bool] = False
    headroom: ClassVar[int] = 64 * 2**20
    traps: ClassVar[tuple[str, ...]] = ()
    build_parameters: ClassVar[dict[str, Any]] = {}
    efforts: ClassVar[tuple[Effort, ...]]

    @abstractmethod
    def load(self) -> None:
        """Import the library: no index is charged for it."""

    @abstractmethod
    def build(self, vectors: Matrix, folder: Path, dram_bytes: int, parameters: dict[str, Any]) -> None:
        """Make an index of `vectors` ``[n, d]``, a memory map, in the empty `folder`, with row numbers as ids."""

    @abstractmethod
    def open(self, folder: Path, dram_bytes: int, parameters: dict[str, Any]) -> None:
        """Open an index for searching with one thread, within `dram_bytes` of DRAM."""

    @abstractmethod
    def search(self, queries: Matrix, k: int, effort: Effort) -> Matrix:
        """Return ids ``[q, k]``, or fewer, of the neighbours of `queries` ``[q, d]``; one query without a batch."""

    @abstractmethod
    def held_bytes(self) -> int:
        """Return the DRAM that the open index holds by its parameters; 0 if they do not tell."""


def row_blocks(vectors: Matrix, rows: int = 65_536) -> list[Matrix]:
    """Return views of consecutive rows, so that a map can be read without being held."""
    return [vectors[start : start + rows] for start in range(0, len(vectors), rows)]


def list_count(count: int, lists_per_sqrt_n: float) -> int:
    """Return the number of inverted lists for `count` vectors: with fewer than 39 a list, k-means has too few."""
    return max(1, min(count // 39, round(lists_per_sqrt_n * math.sqrt(count))))


def sub_quantisers(d: int, most: int) -> int:
    """Return the largest number of sub-quantisers, not over `most`, that divides the dimension."""
    return max(number for number in range(1, min(d, most) + 1) if d % number == 0)


def write_bin(vectors: Matrix, path: Path) -> None:
    """Write ``.fbin`` or ``.u8bin``: two uint32 of count and dimension, then the rows."""
    with path.open("wb") as file:
        np.array(vectors.shape, np.uint32).tofile(file)
        for block in row_blocks(vectors):
            np.ascontiguousarray(block).tofile(file)
