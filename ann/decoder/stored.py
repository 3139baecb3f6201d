"""An index as a store: codes and graph as segments, the layer's rows as rows."""

import json
import shutil
from dataclasses import asdict, replace
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from memhier.ann.decoder.calibration.settings import Method, Settings
from memhier.ann.decoder.coding.view import Codes
from memhier.ann.decoder.described import VERSION, check_settings, check_shapes, decode_about
from memhier.ann.decoder.engine.dram_engine import DramEngine
from memhier.ann.decoder.engine.engine import Engine
from memhier.ann.decoder.engine.stored_engine import StoredEngine
from memhier.ann.decoder.engine.stored_rows import StoredRows
from memhier.ann.decoder.layer import OutputLayer
from memhier.arguments import is_url
from memhier.budget import format_bytes
from memhier.errors import BudgetError, CorruptionError, FormatError
from memhier.fields import described, stored_array
from memhier.rows.rows import RowsWriter
from memhier.store.store import CACHE_BYTES, Store, Verify

__all__ = ["KIND", "check_place", "open_index", "save_index"]

KIND = "decoder"
_BLOCK_BYTES = 32 << 20


def check_place(path: Path) -> None:
    """Raise an error if an index cannot be saved at `path`; leave nothing there."""
    existed = path.exists()
    Store.create(path, kind=KIND).close()
    if not existed:
        shutil.rmtree(path)


def save_index(path: str | PathLike[str], engine: Engine, settings: Settings, method: str, digest: str) -> None:
    """Write everything into a new store, in one commit; of a URL, push it from a temporary directory."""
    if is_url(path):
        with TemporaryDirectory() as folder:
            save_index(f"{folder}/index", engine, settings, method, digest)
            with Store.open(f"{folder}/index", kind=KIND) as store:
                store.push(path)
        return
    layer, codes = engine.layer, engine.codes
    if layer is None:
        raise ValueError("the index is open with its rows on SSD: copy its directory instead of saving it")
    arrays = codes.arrays() | {"bias": layer.bias}
    about = {
        "version": VERSION,
        "dtype": layer.dtype,
        "method": method,
        "digest": digest,
        "settings": asdict(settings),
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


def open_index(
    path: str | PathLike[str],
    budget: int | None,
    verify: Verify,
    cache: str | PathLike[str] | None = None,
    cache_bytes: int | str = CACHE_BYTES,
) -> tuple[Engine, Settings, Method, str]:
    """Return the engine, settings, method and digest of a saved index; rows beyond the budget stay on SSD."""
    store = Store.open(path, kind=KIND, verify=verify, cache=cache, cache_bytes=cache_bytes)
    where = f"{path}: the decoder"
    try:
        raw = store.get("decoder")
        if raw is None:
            raise FormatError(f"{path}: the catalog does not describe a decoder")
        about = decode_about(raw, path)
        sizes = check_shapes(about["arrays"], path)
        with described(where):
            settings = Settings.from_json(about["settings"])
            arrays = {
                name: stored_array(store, name.replace("/", "_"), dtype, tuple(shape))
                for name, (dtype, shape) in about["arrays"].items()
            }
            check_settings(settings, sizes, arrays.get("graph/starts"), path)
            rows = StoredRows(store, about["dtype"], arrays.pop("bias"))
            codes = Codes.of(arrays)
            if rows.shape != (sizes["rows"], sizes["dimension"]):
                raise CorruptionError(f"{path}: holds rows of shape {rows.shape}, expected {sizes}")
    except BaseException:
        store.close()
        raise
    try:
        with described(where):
            engine = _engine(codes, rows, settings, budget)
    except BaseException:
        rows.close()
        raise
    if engine.layer is not None:
        rows.close()
    return engine, settings, about["method"], about["digest"]


def _engine(codes: Codes, rows: StoredRows, settings: Settings, budget: int | None) -> Engine:
    """Return an engine that keeps within a budget: with the rows in DRAM if it holds them.

    Raises
    ------
    BudgetError
        If it holds neither an index with its rows on SSD nor a small one whole.
    """
    if budget is not None:
        # Digits and the rows' codes beside them save bytes of a scan; reads from SSD take longer.
        fewer = replace(codes, digits=None, rows=None if codes.graph is None else codes.rows)
        stored = StoredEngine(fewer, rows)
        spaces = stored.keep(settings.candidates_most)
        whole = codes.memory_bytes + spaces + rows.bias.nbytes + rows.rows_bytes
        if whole > budget:
            held = stored.codes.memory_bytes + spaces + rows.planned_bytes
            if held + rows.scratch_least > budget:
                least = min(held + rows.scratch_least, whole)
                raise BudgetError(
                    f"dram={format_bytes(budget)}: codes, graph, checksums and buffers take more; "
                    f"{least} bytes are enough"
                )
            rows.limit_scratch(budget - held)
            return stored
        del stored  # its workspaces go before the rows come
    return DramEngine(codes, OutputLayer(rows.load(), rows.dtype, rows.bias, owned=True))
