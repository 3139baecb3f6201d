"""A storage of TorchRL larger than DRAM: rows of a `memhier.Tiered`, written at any place."""

import json
import os
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from memhier.arguments import check_int
from memhier.errors import FormatError
from memhier.fields import decode_json, integer, optional, record, row, sequence, text
from memhier.io.reader import Reader
from memhier.log.row_log import RowLog
from memhier.recsys.replay.adapters.common import derived
from memhier.store.store import Store
from memhier.table.tiered import KIND, Tiered

__all__ = ["TieredStorage"]

_NAME = "items"
_ABOUT = "torchrl/items"
_COPIED = 1024
_CHECK = record({
    "max_size": integer(1, 2**31 - 1),
    "length": integer(0, 2**31 - 1),
    "tree": optional(text(r"[\s\S]{0,1000000}")),
    "leaves": sequence(row(sequence(text()), text(r"[a-z0-9]+"), sequence(integer(0, 2**40)))),
})  # fmt: skip


class TieredStorage:
    """Items of TorchRL, at most `max_size`, in a DRAM budget: those in use lie in DRAM, all on SSD.

    It takes TensorDicts, tensors, and trees of tensors, whose layout the first item fixes, and any sampler and writer
    of TorchRL: those with priorities keep these in DRAM for all items, and with ``prefetch=`` a buffer draws batches
    ahead and reads them on its threads.

    Parameters
    ----------
    max_size
        Items at most.
    path
        Directory to make, or one that this class made: its items of the last `dumps` or `state_dict` are there then.
    dram
        Bytes for the tier: rows in use, index, buffers; see `memhier.Tiered`. Priorities of a sampler come on top.
    policy
        As in `memhier.Tiered`.

    Raises
    ------
    FormatError
        When `path` holds something else, or items for another `max_size`.

    Examples
    --------
    With the package torchrl::

        from memhier.recsys.replay.adapters.torchrl import TieredStorage
        from torchrl.data import PrioritizedSampler, TensorDictReplayBuffer

        replay = TensorDictReplayBuffer(
            storage=TieredStorage(1_000_000, "/ssd/replay", dram="1GiB"),
            sampler=PrioritizedSampler(1_000_000, alpha=0.6, beta=0.4),
            batch_size=256,
            prefetch=3,
            priority_key="td_error",
        )
    """

    max_size: int
    _len: int
    _bump_mutation_revision: Any
    _set_last_cursor: Any

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Make a `torchrl.data.replay_buffers.StoreStorage`, the class of those that keep items elsewhere."""
        made: Self = object.__new__(derived(cls, "torchrl.data.replay_buffers", "StoreStorage", "torchrl"))
        return made

    def __init__(
        self, max_size: int, path: str | os.PathLike[str], *, dram: int | str = "64MiB", policy: str = "lru"
    ) -> None:
        import_module("torchrl.data.replay_buffers").Storage.__init__(
            self, check_int("max_size", max_size, 1, 2**31 - 1)
        )
        self.ndim = 1
        self.initialized = False
        self._path = Path(path)
        self._dram = dram
        self._policy = policy
        self._table: Tiered | None = None
        self._store: Store | None = None
        self._rows: _Rows | None = None
        self._kind: Any = None  # a tensorclass
        self._len = 0
        self._last_cursor: Any = None
        if self._path.exists() and any(self._path.iterdir()):
            self._store = Store.open(self._path, KIND, writable=True)
            about = _described(self._store)
            if about["max_size"] != self.max_size:
                raise FormatError(f"{path}: holds items for max_size={about['max_size']}, expected {self.max_size}")
            self._open(_Rows.decode(about))
            self._len = about["length"]

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write items at places: an int, a slice, a range, a list or a tensor of ints."""
        if set_cursor:
            self._set_last_cursor(cursor)
        if isinstance(data, list):
            data = _flipped(data)
        single = isinstance(cursor, int) or (isinstance(cursor, Tensor) and cursor.ndim == 0)
        places = self._places(cursor, self.max_size)
        if not self.initialized:
            self._open(_Rows.of(data if single else _first(data)))
        assert self._table is not None
        assert self._rows is not None
        if getattr(type(data), "_is_tensorclass", False):
            self._kind = type(data)
        flat = places.reshape(-1)
        # Fields that the data lack stay as they are.
        before = self._gathered(flat) if self._rows.lacks(data) else None
        packed = self._rows.pack(data, len(flat), single, before)
        for start in range(0, len(flat), self._table.batch):
            stop = start + self._table.batch
            self._table.scatter(flat[start:stop], packed[start:stop])
        if set_cursor and len(flat):
            self._len = min(max(self._len, int(flat.max()) + 1), self.max_size)
        self._bump_mutation_revision()

    def get(self, index: Any) -> Any:
        """Return the items at places, as they were given."""
        if self._table is None or self._rows is None:
            raise RuntimeError("Cannot get elements out of a non-initialized storage.")
        places = self._places(index, len(self))
        found = self._rows.unpack(self._gathered(places.reshape(-1)), places.shape)
        return found if self._kind is None else self._kind.from_tensordict(found)

    @property
    def memory_bytes(self) -> int:
        """DRAM held by the tier, in bytes."""
        return 0 if self._table is None else self._table.memory_bytes

    def stats(self) -> dict[str, Any]:
        """Return the figures of the tier; see `memhier.Tiered.stats`."""
        return {} if self._table is None else self._table.stats()

    def close(self) -> None:
        """Free all memory, and let others open the directory. Items since the last `dumps` or `state_dict` are lost."""
        if self._table is not None:
            self._table.close()
            self._table = None
        if self._store is not None:
            self._store.close()
            self._store = None

    def state_dict(self) -> dict[str, Any]:
        """Make all items durable, and return where they are; the items stay in place."""
        self._checkpoint()
        return {"path": str(self._path), "initialized": self.initialized, "_len": len(self)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the items of a directory that `state_dict` made durable: copies, unless it is this one's own."""
        if "path" not in state_dict:
            raise ValueError(f"state_dict: expected that of a TieredStorage, got one with the keys {list(state_dict)}")
        if state_dict["initialized"] and Path(state_dict["path"]).absolute() != self._path.absolute():
            self._copy(Path(state_dict["path"]))
        self._len = state_dict["_len"]
        self._bump_mutation_revision()

    def dumps(self, path: Any) -> None:
        """Make all items durable, and copy them into a folder, ``items`` in `path`, in place of an earlier copy."""
        self._checkpoint()
        if self._store is not None:
            Path(path).mkdir(parents=True, exist_ok=True)
            place = Path(path) / "items"
            if place.exists():
                with Store.open(place, KIND) as earlier:
                    _described(earlier)  # raises unless a call of this method wrote it
                shutil.rmtree(place)
            self._store.copy(place)

    def loads(self, path: Any) -> None:
        """Take over the items of a folder that `dumps` wrote."""
        self._len = self._copy(Path(path) / "items")
        self._bump_mutation_revision()

    def __len__(self) -> int:
        return self._len

    def _empty(self) -> None:
        self._len = 0
        self._bump_mutation_revision()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(path={str(self._path)!r}, len={len(self)}, max_size={self.max_size})"

    def _gathered(self, places: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the rows at places, uint8 [n, row_bytes]."""
        assert self._table is not None
        assert self._rows is not None
        packed: NDArray[np.uint8] = np.empty((len(places), max(1, self._rows.row_bytes)), np.uint8)
        for start in range(0, len(places), self._table.batch):
            stop = start + self._table.batch
            self._table.gather(places[start:stop], packed[start:stop])
        return packed

    def _open(self, rows: "_Rows") -> None:
        if self._store is None:
            self._store = Store.create(self._path, KIND)
        width = max(1, rows.row_bytes)
        self._table = Tiered(
            self._store, _NAME, np.uint8, width, rows=self.max_size, key_space=self.max_size, dram=self._dram,
            policy=self._policy,
        )  # fmt: skip
        self._rows, self.initialized = rows, True

    def _checkpoint(self) -> None:
        if self._table is not None and self._rows is not None:
            about = {"max_size": self.max_size, "length": len(self), **self._rows.encode()}
            self._table.checkpoint({_ABOUT: json.dumps(about).encode()})

    def _copy(self, path: Path) -> int:
        """Copy the items of another directory, as of its last checkpoint; return how many."""
        with Store.open(path, KIND) as store, Reader() as reader:
            about = _described(store)
            if about["length"] > self.max_size:
                raise ValueError(f"{path}: holds {about['length']} items, expected at most max_size={self.max_size}")
            rows = _Rows.decode(about)
            if not self.initialized:
                self._open(rows)
            if self._rows != rows or self._table is None:
                raise FormatError(f"{path}: holds items of another layout: {rows}, expected {self._rows}")
            with RowLog(store, _NAME, max(1, rows.row_bytes), reader, self.max_size, key_space=self.max_size) as log:
                for start in range(0, about["length"], _COPIED):
                    keys = np.arange(start, min(start + _COPIED, about["length"]))
                    self._table.scatter(keys, log.read(keys)[0])
        return int(about["length"])

    def _places(self, index: Any, length: int) -> NDArray[np.int64]:
        """Return the places that an index speaks of, int64 of its shape."""
        if isinstance(index, tuple):
            index = index[0] if len(index) == 1 else index
        if isinstance(index, tuple):
            raise TypeError(f"index={index!r}: expected one index; the storage has one dimension")
        if isinstance(index, slice):
            places = np.arange(*index.indices(length))
        elif isinstance(index, range):
            places = np.arange(index.start, index.stop, index.step)
        elif index is None or index is Ellipsis:
            places = np.arange(length)
        else:
            places = np.asarray(index.cpu() if isinstance(index, Tensor) else index)
            if places.dtype == np.bool_:
                places = np.flatnonzero(places)
        places = places.astype(np.int64)
        places = np.where(places < 0, places + length, places)
        if places.size and (int(places.min()) < 0 or int(places.max()) >= length):
            raise IndexError(f"index {index!r}: expected places 0 to {length - 1}")
        return places


class _Rows:
    """The layout of an item in a row of bytes: its leaves end to end.

    Attributes
    ----------
    tree
        None for TensorDicts, else how a tree of tensors is put together.
    """

    def __init__(self, tree: str | None, leaves: list[tuple[tuple[str, ...], torch.dtype, tuple[int, ...]]]) -> None:
        self.tree = tree
        self._leaves = leaves
        self._bytes = [int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for _, dtype, shape in leaves]
        self.row_bytes: int = sum(self._bytes)

    @classmethod
    def of(cls, item: Any) -> "_Rows":
        """Return the layout of one item."""
        names, tensors, tree = _taken_apart(item)
        return cls(tree, [(name, each.dtype, tuple(each.shape)) for name, each in zip(names, tensors, strict=True)])

    def lacks(self, data: Any) -> bool:
        """Whether data have not all leaves."""
        names, _, tree = _taken_apart(data)
        return tree == self.tree and not {name for name, _, _ in self._leaves} <= set(names)

    def pack(self, data: Any, count: int, single: bool, before: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
        """Return items as rows, uint8 [count, row_bytes]; data of fewer axes stand for each of them.

        Leaves that the data lack are those of the rows `before`.
        """
        names, tensors, tree = _taken_apart(data)
        given = dict(zip(names, tensors, strict=True))
        known = {name for name, _, _ in self._leaves}
        if tree != self.tree or not (known & given.keys() if before is not None else known <= given.keys()):
            raise ValueError(f"data: expected the keys {[name for name, _, _ in self._leaves]}, got {list(given)}")
        width = max(1, self.row_bytes)
        rows = torch.zeros((count, width), dtype=torch.uint8) if before is None else torch.from_numpy(before)
        end = 0
        for (name, dtype, shape), width in zip(self._leaves, self._bytes, strict=True):
            if name not in given:
                end += width
                continue
            values = given[name].detach().to("cpu", dtype)
            values = values[None] if single else values
            flat = values.reshape(-1, *shape) if values.numel() == count * max(1, width // dtype.itemsize) else values
            flat = flat.expand(count, *shape).contiguous().reshape(count, -1)
            if width:
                rows[:, end : end + width] = flat.view(torch.uint8)
            end += width
        return rows.numpy()

    def unpack(self, packed: NDArray[np.uint8], shape: tuple[int, ...]) -> Any:
        """Return items of rows, with `shape` before the axes of each leaf."""
        tensors, end = [], 0
        for (_, dtype, inner), width in zip(self._leaves, self._bytes, strict=True):
            part = torch.from_numpy(packed[:, end : end + width].copy())  # with strides of its own
            values = part.view(dtype) if width else torch.empty((len(packed), 0), dtype=dtype)
            tensors.append(values.reshape((*shape, *inner)))
            end += width
        if self.tree is not None:
            return pytree.tree_unflatten(tensors, pytree.treespec_loads(self.tree))
        found = import_module("tensordict").TensorDict({}, batch_size=shape)
        for (name, _, _), values in zip(self._leaves, tensors, strict=True):
            found.set(name, values)
        return found

    def encode(self) -> dict[str, Any]:
        """Return the argument of `decode`, for JSON."""
        leaves = [[list(name), str(dtype).removeprefix("torch."), list(shape)] for name, dtype, shape in self._leaves]
        return {"tree": self.tree, "leaves": leaves}

    @classmethod
    def decode(cls, about: dict[str, Any]) -> "_Rows":
        """Return the layout that `encode` described."""
        leaves = []
        for name, dtype, shape in about["leaves"]:
            found = getattr(torch, dtype, None)
            if not isinstance(found, torch.dtype):
                raise FormatError(f"the description of the items has a dtype {dtype!r}, which torch has not")
            leaves.append((tuple(name), found, tuple(shape)))
        return cls(about["tree"], leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Rows) and self.encode() == other.encode()

    def __hash__(self) -> int:
        return hash(json.dumps(self.encode()))

    def __repr__(self) -> str:
        return str(self.encode())


def _taken_apart(data: Any) -> tuple[list[tuple[str, ...]], list[Tensor], str | None]:
    """Return the names and values of all leaves, and the tree that puts them together; None for a TensorDict."""
    if import_module("tensordict").is_tensor_collection(data):
        names, tensors = [], []
        for key in data.keys(include_nested=True, leaves_only=True):
            value = data.get(key)
            if not isinstance(value, Tensor):
                raise TypeError(f"data[{key!r}]: expected a tensor, got {type(value).__name__}, which no row can hold")
            names.append(key if isinstance(key, tuple) else (key,))
            tensors.append(value)
        return names, tensors, None
    leaves, tree = pytree.tree_flatten(data)
    values = [torch.as_tensor(leaf) for leaf in leaves]
    return [(str(at),) for at in range(len(values))], values, pytree.treespec_dumps(tree)


def _first(data: Any) -> Any:
    """Return the first item of several."""
    if import_module("tensordict").is_tensor_collection(data):
        return data[0]
    return pytree.tree_map(lambda leaf: leaf[0], data)


def _flipped(data: list[Any]) -> Any:
    """Return a list of items as one item of stacked leaves."""
    tensordict = import_module("tensordict")
    if all(tensordict.is_tensor_collection(each) for each in data):
        return torch.stack(data)
    return pytree.tree_map(lambda *leaves: torch.stack([torch.as_tensor(leaf) for leaf in leaves]), *data)


def _described(store: Store) -> dict[str, Any]:
    raw = store.get(_ABOUT)
    if raw is None:
        raise FormatError(f"{store.path}: the store has no items of a TieredStorage; its values are {store.keys()}")
    about: dict[str, Any] = decode_json(raw, f"{store.path}: the value {_ABOUT!r}", _CHECK)
    return about
