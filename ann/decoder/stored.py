"""An index as a store: codes as segments, the layer's rows where they can be read one by one."""

import json
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.codes import BlockCodes, RowCodes
from memhier.ann.decoder.engine import Codes, Engine
from memhier.ann.decoder.graph import Graph
from memhier.ann.decoder.layer import Floats, OutputLayer, as_floats
from memhier.ann.decoder.projection import Projection
from memhier.ann.decoder.settings import Settings
from memhier.budget import format_bytes
from memhier.errors import BudgetError, CorruptionError, FormatError
from memhier.reader import Reader
from memhier.rows import Rows, RowsWriter
from memhier.store import Store, Verify

__all__ = ["KIND", "StoredRows", "open_index", "save_index"]

KIND = "decoder"
VERSION = 3
_BLOCK_BYTES = 32 << 20
_CANDIDATE_BYTES = 64 << 20  # of rows that are read at a time
_PARTS = {"projection": Projection, "blocks": BlockCodes, "rows": RowCodes, "graph": Graph}

Ints: TypeAlias = npt.NDArray[np.int64]


class StoredRows:
    """The layer's rows on SSD.

    Parameters
    ----------
    store
        Open; closed with this.
    dtype
        Of the rows' elements.
    bias
        float32 ``[V]``, in DRAM.
    """

    def __init__(self, store: Store, dtype: str, bias: Floats) -> None:
        self.dtype, self.bias, self._store = dtype, bias, store
        self._reader = Reader()
        self._rows = Rows(store, "weight", self._reader)
        self._carrier = np.dtype("<f4" if dtype == "float32" else "<f2" if dtype == "float16" else "<u2")

    def logits(self, hidden: Floats, candidates: Ints) -> Floats:
        """Return the logits of ``candidates [n, c]``, minus infinity for -1.

        Each row is read once, all at a time; of so many states that their rows may take more than 64 MiB, in parts.
        """
        step = self.states_at_once(candidates.shape[1])
        if len(hidden) > step:
            parts = [slice(start, start + step) for start in range(0, len(hidden), step)]
            return np.concatenate([self.logits(hidden[part], candidates[part]) for part in parts])
        present = candidates >= 0
        wanted, places = np.unique(candidates[present], return_inverse=True)
        rows = self._floats(self._rows.read(wanted))
        logits = np.full(candidates.shape, -np.inf, np.float32)
        if len(hidden) == 1:
            logits[present] = (rows @ hidden[0])[places] + self.bias[wanted][places]
            return logits
        # State by state: the rows of all, side by side, would be many times what was read.
        counts = present.sum(1)
        for state, found, here, end, count in zip(hidden, logits, present, counts.cumsum(), counts, strict=True):
            which = places[end - count : end]
            found[here] = rows[which] @ state + self.bias[wanted[which]]
        return logits

    def states_at_once(self, candidates: int) -> int:
        """Return of how many states the candidates' rows are read at a time."""
        return max(1, _CANDIDATE_BYTES // max(1, candidates * int(self._rows.row_bytes)))

    def all_logits(self, hidden: Floats) -> Floats:
        """Return all logits ``[n, V]``: a pass over the whole file."""
        words, step = len(self._rows), max(1, _BLOCK_BYTES // self._rows.row_bytes)
        out = np.empty((len(hidden), words), np.float32)
        for start in range(0, words, step):
            stop = min(words, start + step)
            out[:, start:stop] = hidden @ self._floats(self._rows.read_range(start, stop)).T
        out += self.bias
        return out

    def stats(self) -> dict[str, Any]:
        """Return what the reader has done since open."""
        return self._reader.stats()

    def close(self) -> None:
        """Release the files."""
        self._reader.close()
        self._store.close()

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes: biases, checksums of pages, the reader's buffers."""
        return self.bias.nbytes + self._store.memory_bytes + self._reader.memory_bytes

    def _floats(self, rows: npt.NDArray[np.uint8]) -> Floats:
        return as_floats(rows.view(self._carrier), self.dtype)


def save_index(path: Path, engine: Engine, settings: Settings, method: str, digest: str) -> None:
    """Write everything into a new store, in one commit."""
    layer, codes = engine.layer, engine.codes
    if not isinstance(layer, OutputLayer):
        raise ValueError("the index is open with its rows on SSD: copy its directory instead of saving it")
    arrays = {f"{name}/{field}": array for name, field, array in _arrays(codes)} | {"bias": layer.bias}
    about = {
        "version": VERSION,
        "dtype": layer.dtype,
        "method": method,
        "digest": digest,
        "settings": settings.to_json(),
        "arrays": {name: [str(array.dtype), list(array.shape)] for name, array in arrays.items()},
    }
    with Store.create(path, kind=KIND) as store, store.begin() as tx:
        for name, array in arrays.items():
            tx.segment(name.replace("/", "_")).append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        writer = RowsWriter(tx, "weight", row_bytes=layer.weight.itemsize * layer.shape[1])
        step = max(1, _BLOCK_BYTES // writer.row_bytes)
        for start in range(0, layer.shape[0], step):
            writer.append(layer.weight[start : start + step].view(np.uint8))
        writer.finish()
        tx.put("decoder", json.dumps(about).encode())
        tx.commit()


def open_index(path: Path, budget: int | None, verify: Verify) -> tuple[Engine, Settings, Any, str]:
    """Return what was saved; rows stay on SSD when a budget does not hold them."""
    store = Store.open(path, kind=KIND, verify=verify)
    try:
        raw = store.get("decoder")
        if raw is None:
            raise FormatError(f"{path}: the catalog does not describe a decoder")
        about = json.loads(raw)
        if about["version"] != VERSION:
            raise FormatError(
                f"{path}: decoder format {about['version']}, this memhier reads {VERSION}; build it again"
            )
        arrays = {name: _load(store, name, *described) for name, described in about["arrays"].items()}
        bias = arrays.pop("bias")
        codes = _codes(arrays)
        settings = Settings.from_json(about["settings"])
        rows = StoredRows(store, about["dtype"], bias)
    except (KeyError, TypeError) as error:
        store.close()
        raise CorruptionError(f"{path}: the decoder is not as described: {error!r}") from error
    except BaseException:
        store.close()
        raise
    least = codes.memory_bytes + rows.memory_bytes
    weight_bytes = rows._rows.row_bytes * len(rows._rows)
    if budget is not None and least > budget:
        rows.close()
        raise BudgetError(f"dram={format_bytes(budget)}: codes, graph and checksums take {format_bytes(least)}")
    if budget is not None and least + weight_bytes > budget:
        return Engine(codes, rows), settings, about["method"], about["digest"]
    try:
        weight = rows._rows.read_range(0, len(rows._rows)).view(rows._carrier)
    finally:
        rows.close()
    layer = OutputLayer(weight, about["dtype"], bias, owned=True)
    return Engine(codes, layer), settings, about["method"], about["digest"]


def _arrays(codes: Codes) -> list[tuple[str, str, npt.NDArray[Any]]]:
    parts = {name: getattr(codes, name) for name in _PARTS}
    found = [
        (name, field, getattr(part, field))
        for name, part in parts.items()
        if part is not None
        for field in part.__dataclass_fields__
    ]
    return [*found, ("codes", "norms", codes.norms)]


def _codes(arrays: dict[str, npt.NDArray[Any]]) -> Codes:
    parts: dict[str, Any] = {}
    for name, kind in _PARTS.items():
        fields = {key.partition("/")[2]: array for key, array in arrays.items() if key.startswith(f"{name}/")}
        parts[name] = kind(**fields) if fields else None
    return Codes(**parts, norms=arrays["codes/norms"])


def _load(store: Store, name: str, dtype: str, shape: list[int]) -> npt.NDArray[Any]:
    raw = store.read_segment(name.replace("/", "_"))
    try:
        return raw.view(np.dtype(dtype)).reshape(shape)
    except ValueError as error:
        raise CorruptionError(f"{store.path}: segment {name} is not as described: {error}") from error
