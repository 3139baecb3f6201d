"""The state of an index at one moment, and the DRAM that it takes."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier import backend
from memhier.ann.zoom.calibration.calibration import Calibration
from memhier.ann.zoom.filters.attributes import Schema
from memhier.ann.zoom.filters.bitmaps import BitmapCache, Words, bitmap_bytes
from memhier.ann.zoom.preview.codes import CodeBook
from memhier.ann.zoom.preview.preview import Preview
from memhier.ann.zoom.preview.scan_arguments import CodedPart, split_positions
from memhier.ann.zoom.preview.space import PreviewSpace
from memhier.ann.zoom.preview.stored_scan import WAVE_COPIES, StoredPart
from memhier.ann.zoom.storage.arrays import PartArrays
from memhier.ann.zoom.storage.catalog import Description, load_preview
from memhier.ann.zoom.storage.fresh import Fresh
from memhier.ann.zoom.storage.fullview import vectors_of, workspace_bytes
from memhier.ann.zoom.storage.ids import IdKind, Ids, Located, ids_of, locate_all, stream_ids
from memhier.ann.zoom.storage.layout import pool_pages, read_contexts, scan_bytes, wave_bytes
from memhier.ann.zoom.storage.part import Findable, IndexPart, PartFiles, held_bytes
from memhier.ann.zoom.storage.stored_arrays import StoredArrays
from memhier.io.kernels import METRICS, ROW_DTYPES
from memhier.io.page_file import PAGE_BYTES
from memhier.io.reader import Reader
from memhier.rows.rank_request import HotPages, page_keys
from memhier.rows.ranking import page_rows_of
from memhier.shield import settle
from memhier.store.store import Store

__all__ = ["Footprint", "IndexSnapshot"]

Ints: TypeAlias = npt.NDArray[np.int64]

_BLOCK_BYTES = 4 << 20
_SPARED = 8  # the part of the budget that pages leave to the work of changes, where an index is open for them


@dataclass(frozen=True)
class IndexSnapshot:
    """The state of an index at one moment. A search keeps the snapshot that it started with.

    Attributes
    ----------
    space, dtype, schema
        The space and dtype of the vectors, and the types of their attributes.
    preview
        Lists and code book.
    parts
        Rows on SSD.
    fresh
        Rows that wait in DRAM.
    calibration
        The effort for each recall.
    hot
        Pages held in DRAM.
    scan_bytes
        DRAM for the candidates of queries that are searched together.
    documents
        Names of the documents, in the order of their numbers.
    """

    space: PreviewSpace
    dtype: np.dtype[Any]
    schema: Schema
    preview: Preview
    parts: tuple[IndexPart, ...]
    fresh: Fresh
    calibration: Calibration
    hot: HotPages
    scan_bytes: int
    documents: tuple[str, ...] = ()

    @cached_property
    def findable(self) -> Findable:
        """The rows on SSD that a search without a filter can find."""
        return Findable(self.parts, [part.alive for part in self.parts])

    @cached_property
    def compiled(self) -> Any:
        """The state as a search without a filter takes it in one call of the native core.

        None where there is no core, and where codes have no bounds.
        """
        core, preview, space, rows = backend.core, self.preview, self.space, self.findable
        if core is None or not isinstance(preview.book, CodeBook):
            return None
        rows_on_ssd = core.StoredRows(
            type=ROW_DTYPES.index(self.dtype_name), row_bytes=self.row_bytes, per_page=self.page_rows,
            hot_keys=self.hot.keys, hot_pages=self.hot.pages,
        )  # fmt: skip
        stored = [part for part in rows.coded if isinstance(part, StoredPart)]
        return core.IndexState(
            space=preview.book.space(METRICS.index(space.metric), space.dimension, space.scale),
            stored=rows_on_ssd,
            parts=[part.compiled for part in rows.coded if isinstance(part, CodedPart)],
            stored_lists=[part.compiled for part in stored],
            wave_pages=WAVE_COPIES * stored[0].wave_bytes // PAGE_BYTES if stored else 0,
            routing=self.preview.router.compiled,
            page_rows=[part.compiled for part in rows.page_rows],
            **preview.compiled,
        )  # fmt: skip

    @cached_property
    def plans(self) -> dict[Hashable, Any]:
        """How to search, by all that decides on it, for `memhier.ann.zoom.search.planning` alone."""
        return {}

    @cached_property
    def count(self) -> int:
        """Vectors that a search can find."""
        return self.findable.total + len(self.fresh.ids)

    @cached_property
    def bitmap_bytes(self) -> int:
        """DRAM of a bit for each row on SSD."""
        return bitmap_bytes(*[len(part) for part in self.parts])

    @cached_property
    def dtype_name(self) -> str:
        """The name of the dtype of the vectors."""
        return self.dtype.name

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a vector on SSD."""
        return self.dtype.itemsize * self.space.dimension

    @cached_property
    def page_rows(self) -> int:
        """Vectors that lie whole in a page; 0 where they straddle pages."""
        return page_rows_of(self.row_bytes)

    @classmethod
    def load(
        cls, store: Store, about: Description, files: PartFiles, reader: Reader,
        known: Mapping[str, PartArrays | StoredArrays] | None = None,
    ) -> Self:  # fmt: skip
        """Return the snapshot that the catalog describes; the arrays of some parts may be `known` by name."""
        preview, dtype, held = load_preview(store, about), np.dtype(about.dtype), known or {}
        parts = tuple(
            files.load(entry, preview, about.row_bytes, about.schema, held.get(entry["name"])) for entry in about.parts
        )
        by_name = {part.name: part.file for part in parts}
        keys = page_keys([by_name[name] for name, _ in about.hot], [page for _, page in about.hot])
        return cls(
            about.space, dtype, about.schema, preview, parts,
            Fresh.empty(about.space.dimension, dtype, about.id_kind == "str"), about.calibration,
            HotPages.load(reader, np.sort(keys)), scan_bytes(about.dram, about.searches), tuple(about.documents),
        )  # fmt: skip

    @property
    def id_kind(self) -> IdKind:
        """The type of the ids."""
        return "int64" if self.fresh.texts is None else "str"

    @property
    def longest_list(self) -> float:
        """Rows of the longest list, in times of the mean; removed rows included. 0 without rows on SSD."""
        lengths = np.sum([np.diff(part.arrays.starts) for part in self.parts], axis=0)
        return float(np.max(lengths) / mean) if (mean := np.mean(lengths)) else 0.0

    def vectors_of(self, ids: Ids, reader: Reader) -> npt.NDArray[Any]:
        """Return the vectors of ids, ``[n, d]``; KeyError for an id that is not in the index."""
        return self.vectors_in(locate_all(self.parts, self.fresh, ids), reader)

    def vectors_in(self, places: Located, reader: Reader) -> npt.NDArray[Any]:
        """Return the vectors in these places, ``[n, d]``."""
        is_fresh = places.fresh >= 0
        out = np.empty((len(is_fresh), self.space.dimension), self.dtype)
        out[is_fresh] = self.fresh.vectors[places.fresh[is_fresh]]
        out[~is_fresh] = self.vectors_at(places.positions[~is_fresh], reader)
        return out

    def vectors_at(self, positions: Ints, reader: Reader) -> npt.NDArray[Any]:
        """Return the vectors at positions on SSD, ``[n, d]``."""
        out = np.empty((len(positions), self.space.dimension), self.dtype)
        number, rows = split_positions(positions)
        for which, part in enumerate(self.parts):
            here = np.flatnonzero(number == which)
            if len(here):
                out[here] = vectors_of(part.read(reader, rows[here]), self.dtype)
        return out

    def arrays_in(self, store: Store, following: Store) -> dict[str, PartArrays | StoredArrays]:
        """Return the arrays of the parts that another commit has as well, by name; `store` has this one."""
        pairs = [
            (part, zip(part.arrays.segments(store, part.name), part.arrays.segments(following, part.name), strict=True))
            for part in self.parts
        ]
        return {
            part.name: part.arrays for part, segments in pairs
            if all(old is not None and new is not None and old.is_same(new) for old, new in segments)
        }  # fmt: skip

    def ids(
        self, selected: Sequence[Words] | None = None, fresh: npt.NDArray[np.bool_] | None = None
    ) -> Iterator[npt.NDArray[Any]]:
        """Yield ids; see :func:`stream_ids`."""
        return stream_ids(self.parts, self.fresh, selected, fresh)

    def blocks(self, reader: Reader) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """Yield ids and vectors of all parts in the order on SSD, a few MiB at a time, then of those that wait."""
        step = max(1, _BLOCK_BYTES // self.row_bytes)
        for part in self.parts:
            for start in range(0, len(part), step):
                rows = np.arange(start, min(start + step, len(part)))
                rows = rows[part.is_alive(rows)]
                if len(rows):
                    yield ids_of(part, rows).values(), vectors_of(part.read(reader, rows), self.dtype)
        if len(self.fresh):
            yield Ids(self.fresh.ids, self.fresh.texts).values(), self.fresh.vectors


class Footprint:
    """The DRAM of an index: the bytes that it holds with a snapshot, and the most that these become.

    Parameters
    ----------
    store, reader, cache
        Of the index; `cache` holds the bitmaps of filters.
    about
        The catalog's description of the index.
    pool
        Whether the reader holds pages in the DRAM that is left.

    Attributes
    ----------
    audit_bytes
        DRAM of the audit.
    """

    def __init__(self, store: Store, reader: Reader, cache: BitmapCache, about: Description, pool: bool = True) -> None:
        self._store, self._reader, self._cache = store, reader, cache
        self._searches, self._changes, self._dram = about.searches, about.coding == "rabitq", about.dram
        self.audit_bytes: int = 0
        self._has_pool, self._pool_pages = pool, 0
        self._spared = about.dram // _SPARED if store.writable else 0
        waves = WAVE_COPIES * wave_bytes(about.dram) if about.on_ssd else 0
        # Of one search, filters apart.
        self.search_bytes: int = workspace_bytes(about.row_bytes) + scan_bytes(about.dram, about.searches) + waves

    def held(self, state: IndexSnapshot) -> int:
        """Return the DRAM held, in bytes: codes, ids, lists, checksums, fresh vectors, buffers of all searches."""
        settle()  # closes the files of parts that no snapshot has any more
        each = self.search_bytes
        if state.schema:  # the bitmap of the rows that a filter selects
            each += state.bitmap_bytes
        parts = state.preview.memory_bytes + held_bytes(state.parts) + state.fresh.memory_bytes
        parts += 0 if (strays := state.calibration.strays) is None else strays.memory_bytes
        outside = self._store.memory_bytes + self._reader.memory_bytes + self._cache.memory_bytes
        return parts + state.hot.memory_bytes + outside + self._searches * each + self.audit_bytes

    def needed(self, state: IndexSnapshot) -> int:
        """Return the most DRAM: with all searches running, with filters, and rows removed from every part.

        Joins of parts, and pages that the reader holds, come on top.
        """
        pool = self._reader.pool_bytes
        contexts = min(self._searches, read_contexts(self._dram))
        idle = contexts * self._reader.planned_bytes - (self._reader.memory_bytes - pool)
        filters = self._cache.limit - self._cache.memory_bytes if state.schema else 0
        removals = 0
        if self._changes:  # a removal makes another bitmap beside the part's own
            rows = [len(part) for part in state.parts]
            removals = bitmap_bytes(*rows, *[len(part) for part in state.parts if part.alive is None])
        return self.held(state) - pool + max(0, idle) + filters + removals

    def fit_pool(self, needed: int) -> None:
        """Let the reader hold pages in the DRAM of the budget that is left beside `needed` bytes."""
        pages = pool_pages(self._dram - self._spared - needed, self._reader.holdable_pages) if self._has_pool else 0
        self._reader.hold_pages(pages)
        self._pool_pages = pages

    def shrink_pool(self, needed: int) -> None:
        """Let the reader hold no more pages than leave `needed` bytes of the budget."""
        if self._pool_pages and needed + self._reader.pool_bytes > self._dram - self._spared:
            self.fit_pool(needed)
