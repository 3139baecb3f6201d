"""An index as a store: codes as segments, the layer's rows where they can be read one by one."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.calibration.settings import CERTIFY_LIMIT, Settings
from memhier.ann.decoder.coding.codes import BlockCodes, RowCodes
from memhier.ann.decoder.coding.graph import Graph
from memhier.ann.decoder.coding.layer import Floats, OutputLayer, as_floats
from memhier.ann.decoder.coding.projection import Projection
from memhier.ann.decoder.described import VERSION, check_settings, check_shapes, decode_about
from memhier.ann.decoder.engine import Codes, Engine
from memhier.budget import format_bytes
from memhier.errors import BudgetError, CorruptionError, FormatError
from memhier.fields import described, stored_array
from memhier.io.reader import Reader
from memhier.rows.rows import Rows, RowsWriter
from memhier.store.store import Store, Verify

__all__ = ["KIND", "StoredRows", "check_place", "open_index", "save_index"]

KIND = "decoder"
_BLOCK_BYTES = 32 << 20
_SCRATCH_MOST = 128 << 20  # bytes; more would not make a pass over rows faster
_ROWS_LEAST = 64  # that are read at a time
_CANDIDATE_COST, _LOGIT_COST = 128, 64  # bytes that arrays of them take, all of them together
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

    Attributes
    ----------
    scratch
        Bytes of DRAM that rows take while they are read and multiplied, and arrays of candidates beside them.
    """

    def __init__(self, store: Store, dtype: str, bias: Floats) -> None:
        self.dtype, self.bias, self._store = dtype, bias, store
        self._reader = Reader()
        self._rows = Rows(store, "weight", self._reader)
        self._carrier = np.dtype("<f4" if dtype == "float32" else "<f2" if dtype == "float16" else "<u2")
        self.scratch = _SCRATCH_MOST

    def logits(self, hidden: Floats, candidates: Ints) -> Floats:
        """Return the logits of ``candidates [n, c]``, minus infinity for -1.

        Each row is read once, all in one submission, or in several where they would take more than the scratch.
        """
        present = candidates >= 0
        wanted, places = np.unique(candidates[present], return_inverse=True)
        logits, ends = np.full(candidates.shape, -np.inf, np.float32), present.sum(1).cumsum()
        step = max(1, self.scratch // 2 // self._row_cost)
        for start in range(0, len(wanted), step):
            some = wanted[start : start + step]
            rows, bias = self._floats(self._rows.read(some)), self.bias[some]
            # State by state: the rows of all, side by side, would be many times what was read.
            for state, found, here, places_of in zip(
                hidden, logits, present, np.split(places - start, ends[:-1]), strict=True
            ):
                inside = (places_of >= 0) & (places_of < len(some))
                which = places_of[inside]
                found[np.flatnonzero(here)[inside]] = rows[which] @ state + bias[which]
        return logits

    def states_at_once(self, candidates: int) -> int:
        """Return for how many states arrays of so many candidates each are held at a time."""
        return max(1, self.scratch // 2 // (_CANDIDATE_COST * candidates))

    def blocks(self, hidden: Floats) -> Iterator[tuple[int, Floats]]:
        """Yield the logits of all rows, ``[n, b]``, in blocks, each with the number of its first row: one pass."""
        words, each = len(self._rows), max(self._row_cost, _LOGIT_COST * len(hidden))
        step = max(1, self.scratch // 2 // each)
        for start in range(0, words, step):
            stop = min(words, start + step)
            yield start, hidden @ self._floats(self._rows.read_range(start, stop)).T + self.bias[start:stop]

    def load(self) -> npt.NDArray[Any]:
        """Return all rows as an array in DRAM, ``[V, D]``."""
        rows = np.empty((len(self._rows), self._rows.row_bytes), np.uint8)
        step = max(1, _BLOCK_BYTES // self._rows.row_bytes)
        for start in range(0, len(rows), step):
            block = rows[start : start + step]
            self._rows.read_range(start, start + len(block), block)
        return rows.view(self._carrier)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and elements of each."""
        return len(self._rows), int(self._rows.row_bytes) // self._carrier.itemsize

    @property
    def rows_bytes(self) -> int:
        """DRAM that all rows would take, in bytes."""
        return int(self._rows.row_bytes) * len(self._rows)

    @property
    def planned_bytes(self) -> int:
        """DRAM that is held once calls of one thread at a time have run, in bytes; the scratch is not."""
        return self.bias.nbytes + self._store.memory_bytes + self._reader.planned_bytes

    @property
    def scratch_least(self) -> int:
        """Scratch below which it would not do: for some rows, and for the candidates of one proof."""
        return 2 * max(_ROWS_LEAST * self._row_cost, _CANDIDATE_COST * CERTIFY_LIMIT)

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

    @property
    def _row_cost(self) -> int:
        """DRAM of a row in use, in bytes: as it was read, as floats, and a copy of these."""
        dimension = int(self._rows.row_bytes) // self._carrier.itemsize
        return dimension * (8 if self.dtype == "float32" else 10)

    def _floats(self, rows: npt.NDArray[np.uint8]) -> Floats:
        return as_floats(rows.view(self._carrier), self.dtype)


def check_place(path: Path) -> None:
    """Refuse a place where an index cannot be saved, before it is built; nothing stays there."""
    existed = path.exists()
    Store.create(path, kind=KIND).close()
    if not existed:
        shutil.rmtree(path)


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
        about = decode_about(raw, path)
        sizes = check_shapes(about["arrays"], path)
        with described(f"{path}: the decoder"):
            settings = Settings.from_json(about["settings"])
            arrays = {
                name: stored_array(store, name.replace("/", "_"), dtype, tuple(shape))
                for name, (dtype, shape) in about["arrays"].items()
            }
            check_settings(settings, sizes, arrays.get("graph/starts"), path)
            bias = arrays.pop("bias")
            codes = _codes(arrays)
            rows = StoredRows(store, about["dtype"], bias)
            if rows.shape != (sizes["rows"], sizes["dimension"]):
                raise CorruptionError(f"{path}: holds rows of shape {rows.shape}, expected {sizes}")
    except BaseException:
        store.close()
        raise
    try:
        fits = _fit(codes, rows, settings, budget)
        layer = OutputLayer(rows.load(), about["dtype"], bias, owned=True) if fits else rows
    except BaseException:
        rows.close()
        raise
    if fits:
        rows.close()
    with described(f"{path}: the decoder"):
        return Engine(codes, layer), settings, about["method"], about["digest"]


def _fit(codes: Codes, rows: StoredRows, settings: Settings, budget: int | None) -> bool:
    """Say whether a budget holds the rows, too; with one that does not, give them what it leaves.

    Raises
    ------
    BudgetError
        When it does not hold what an index needs with its rows on SSD, nor a small one whole.
    """
    if budget is None:
        return True
    view = codes.memory_bytes + Engine(codes, rows).keep(1, settings.candidates_most)
    if view + rows.bias.nbytes + rows.rows_bytes <= budget:
        return True
    held = view + rows.planned_bytes
    if held + rows.scratch_least > budget:
        least = min(held + rows.scratch_least, view + rows.bias.nbytes + rows.rows_bytes)
        raise BudgetError(
            f"dram={format_bytes(budget)}: codes, graph, checksums and buffers take more; {least} bytes are enough"
        )
    rows.scratch = min(_SCRATCH_MOST, budget - held)
    return False


def _arrays(codes: Codes) -> list[tuple[str, str, npt.NDArray[Any]]]:
    parts = {name: getattr(codes, name) for name in _PARTS}
    found = [
        (name, field, getattr(part, field))
        for name, part in parts.items()
        if part is not None
        for field in part.__dataclass_fields__
    ]
    return [*found, ("codes", "norms", codes.norms), ("codes", "hashes", codes.hashes)]


def _codes(arrays: dict[str, npt.NDArray[Any]]) -> Codes:
    parts: dict[str, Any] = {}
    for name, kind in _PARTS.items():
        fields = {key.partition("/")[2]: array for key, array in arrays.items() if key.startswith(f"{name}/")}
        parts[name] = kind(**fields) if fields else None
    return Codes(**parts, norms=arrays["codes/norms"], hashes=arrays["codes/hashes"])
