"""ZoomIndex: search more vectors than fit in DRAM (Zoom, arXiv 1809.04067, and what came after)."""

import errno
import shutil
import warnings
import weakref
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.arguments import check_count, check_queries, check_vectors
from memhier.ann.zoom.calibration.calibrate import TARGET
from memhier.ann.zoom.calibration.tune import load_hot, tune_snapshot
from memhier.ann.zoom.construction.build import BuildOptions, write_index
from memhier.ann.zoom.filters.attributes import COLUMN_BYTES
from memhier.ann.zoom.filters.bitmaps import BitmapCache, bitmap_bytes
from memhier.ann.zoom.ids.ids import as_ids, refuse_clashes
from memhier.ann.zoom.preview.layout import CONTEXTS_MOST, attribute_bytes, codes_can_grow, read_depth, scan_bytes
from memhier.ann.zoom.preview.preview import CODINGS, Coding
from memhier.ann.zoom.preview.space import METRICS, Metric
from memhier.ann.zoom.renewal.fresh import Fresh
from memhier.ann.zoom.renewal.life import IndexWriter
from memhier.ann.zoom.search.search import Snapshot
from memhier.ann.zoom.search.searched import SearchedIndex
from memhier.ann.zoom.storage.catalog import KIND, Description, load_preview
from memhier.ann.zoom.storage.fullview import workspace_bytes
from memhier.ann.zoom.storage.part import PartFiles
from memhier.budget import parse_bytes
from memhier.callers import user_stacklevel
from memhier.errors import FormatError
from memhier.io.reader import Reader
from memhier.shield import close_made, settle, shielded, shielded_giving
from memhier.store.store import Store, Verify

__all__ = ["ZoomIndex"]

Floats: TypeAlias = npt.NDArray[np.float32]
_TUNING_BYTES = 4096  # that the catalog may grow by, beside the pages named in it
_TUNE_LEAST = 64


class ZoomIndex(SearchedIndex):
    """A vector index with a compressed preview in DRAM and the full vectors on SSD.

    A search scans codes in DRAM, reads the full vectors that their bounds cannot exclude, and ranks those exactly.
    Make one with :meth:`build` or :meth:`open`. Searches may run from several threads at once.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from memhier.ann import ZoomIndex
    >>> vectors = np.random.default_rng(0).normal(size=(2000, 32)).astype("float32")
    >>> path = tempfile.mkdtemp() + "/index"
    >>> with ZoomIndex.build(path, vectors, dram="4MiB") as index:
    ...     index.search(vectors[7], k=3, recall=0.95).ids[0]
    np.int64(7)
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        raw = store.get("index")
        if raw is None:
            raise FormatError(f"{store.path}: the catalog does not describe an index")
        self._about = Description.decode(raw, store.path)
        self._cache = BitmapCache(max(1, attribute_bytes(self._about.dram) - _held_of_attributes(store, self._about)))
        reader = Reader(depth=read_depth(self._about.dram))
        try:
            work_bytes = workspace_bytes(self._about.row_bytes) + scan_bytes(
                self._about.dram
            )  # a search's own, before it
            self._files = PartFiles(store, reader, self._cache, self._about.id_kind == "str", work_bytes)
            super().__init__(self._load(reader), reader, self._about.searches)
        except BaseException:
            reader.close()
            raise
        self._writer: IndexWriter | None = None
        if store.writable:
            # Not strongly: an index that an interrupt has lost goes, and its lock with it, without a collection.
            planned = weakref.WeakMethod(self._planned)

            def memory(state: Snapshot) -> int:
                method = planned()
                assert method is not None, "the writer is used by its index alone"
                return method(state)

            self._writer = IndexWriter(store, reader, self._files, self._about, memory)

    @classmethod
    def build(
        cls,
        path: str | PathLike[str],
        vectors: object,
        *,
        ids: object = None,
        attributes: Any = None,
        metric: Metric = "l2",
        preview: Coding = "rabitq",
        dram: int | str = "64MiB",
        grow_to: int = 0,
        seed: int = 0,
        progress: bool = False,
    ) -> Self:
        """Build an index in the new directory `path` and return it open.

        Nothing appears under `path` as an index before the last step, which is atomic. A build that was killed leaves
        a directory that :meth:`open` refuses and that the next build takes over.

        Parameters
        ----------
        path
            A directory that does not exist yet; its parent does.
        vectors
            Array, memmap or h5py data set ``[n, d]``, a file that :func:`memhier.ann.open_vectors` reads, or an
            iterator of blocks; float32, float16, int8 or uint8 (float64 and bfloat16 are stored as float32, and so are
            other integers, unless it does not hold them exactly). ``[0, d]`` makes an index to be filled by
            :meth:`add`; give `grow_to` then. Read in blocks, never held whole. A build takes DRAM for the codes, 32
            bytes a vector, a training sample of at most 256 MiB twice and some 200 MiB of blocks; and up to three times
            the vectors' size on disk while it runs.
        ids
            Integers ``[n]``, -1 excepted, or strings of 1 to 1,024 bytes, each once; 0 to n - 1 when not given. The
            index has ids of that kind from then on.
        attributes
            What searches may filter by: ``{name: values}``, a table of pandas, polars or pyarrow, or a dict per vector.
        metric
            ``"l2"``, ``"ip"`` (inner product) or ``"cosine"``.
        preview
            ``"rabitq"``: codes of a few bits a dimension with bounds, so that a search reads what it needs and a
            recall can be declared. ``"pq"``: product-quantised codes, the paper's form, which reads a fixed number of
            candidates; such an index is not changed or filtered.
        dram
            What the open index may hold in DRAM, as bytes or text such as ``"64MiB"``: codes, ids, lists, checksums,
            buffers of as many searches as run at a time, with their filters, marks of what was removed, vectors that
            were not yet written, and what :meth:`add`, :meth:`remove`, :meth:`update` and :meth:`commit` work with.
            Beyond it come only what calls are given and return, Python's own objects, and :meth:`tune` and
            :meth:`compact` while they run, also where a commit lets a thread compact, which take what a build does.
            Longer codes, which let a search read less for the same recall, are used as far as it allows.
        grow_to
            Vectors that the index is to hold in that DRAM some day, where they are more than now.
        seed
            Fixes sampling and training; equal input and seed give an equal index.
        progress
            Show a progress bar.

        Raises
        ------
        FileExistsError
            When `path` holds anything already.
        FileNotFoundError
            When the folder that `path` is to lie in does not exist.
        BudgetError
            When `dram` is too small; the message says what would be enough.
        ValueError, TypeError
            When vectors, ids or attributes cannot be indexed. Nothing is left behind.
        """
        if metric not in METRICS:
            raise ValueError(f"metric={metric!r}: expected one of {', '.join(METRICS)}")
        if preview not in CODINGS:
            raise ValueError(f"preview={preview!r}: expected one of {', '.join(CODINGS)}")
        if attributes is not None and preview == "pq":
            raise ValueError("attributes: an index with preview='pq' cannot be filtered; expected preview='rabitq'")
        options = BuildOptions(
            metric,
            preview,
            parse_bytes(dram, "dram"),
            check_count("grow_to", grow_to, 0, None),
            check_count("seed", seed, 0, 2**31 - 2, "what faiss takes"),
            progress,
        )
        if (names := None if ids is None else as_ids(ids, None)) is not None:
            refuse_clashes(names)
        place = Path(path).absolute()  # whatever directory a source of vectors may change to
        existed = place.exists()
        try:
            with Store.create(place, kind=KIND) as store:
                write_index(store, vectors, names, attributes, options)
        except BaseException:
            if not existed:
                shutil.rmtree(place, ignore_errors=True)
            raise
        index = cls.open(place, writable=True)
        try:
            index._say_if_short(dram)
        except BaseException:
            index.close()
            raise
        return index

    @classmethod
    @shielded_giving(close_made)
    def open(cls, path: str | PathLike[str], *, writable: bool = False, verify: Verify = "read") -> Self:
        """Open the index at `path`.

        Parameters
        ----------
        path
            A directory made by :meth:`build`.
        writable
            Whether it may be changed, by one process at a time. Any number search it meanwhile, each the state that was
            committed when it opened.
        verify
            ``"read"`` checks each page of vectors as it is read, ``"open"`` checks the whole index now as well,
            ``"off"`` trusts the disk. Codes and lists are checked at open unless it is ``"off"``.

        Raises
        ------
        FileNotFoundError, FormatError, CorruptionError
            When there is no index at `path`, or it is damaged.
        LockedError
            When another process has it open for writing, and this one wants to.
        """
        store = Store.open(Path(path), kind=KIND, writable=writable, verify=verify)
        try:
            return cls(store)
        except BaseException:
            store.close()
            raise

    @shielded
    def add(self, vectors: npt.ArrayLike, ids: object = None, attributes: Any = None) -> npt.NDArray[Any]:
        """Add vectors; searches find them at once, and :meth:`commit` makes them durable.

        Parameters
        ----------
        vectors
            ``[n, d]``, or ``[d]`` for one, that fit the dtype of the index.
        ids
            Integers or strings ``[n]``, as the index has, that are not in it; the next free integers when not given.
        attributes
            As in :meth:`build`. An attribute that the index did not have is null for the vectors before.

        Returns
        -------
        numpy.ndarray
            int64, or strings as objects, ``[n]``: the ids.

        Raises
        ------
        BudgetError
            When the DRAM given at build cannot hold as many; nothing was added.
        ValueError, TypeError
            When vectors, ids or attributes do not fit; nothing was added.
        """
        writer = self._check_writable()
        matrix = check_vectors(vectors, self.dimension, self._state.dtype)
        names = None if ids is None else as_ids(ids, self._about.id_kind)
        with writer.lock:
            self._state, found = writer.add(self._state, matrix, names, attributes)
        return found.values()

    @shielded
    def remove(self, ids: object) -> None:
        """Remove vectors; searches no longer find them, and :meth:`commit` makes it durable.

        Raises
        ------
        KeyError
            For an id that is not in the index; nothing was removed.
        """
        writer = self._check_writable()
        names = as_ids(ids, self._about.id_kind)
        with writer.lock:
            self._state = writer.remove(self._state, names)

    @shielded
    def update(self, ids: object, vectors: npt.ArrayLike, attributes: Any = None) -> None:
        """Replace vectors, and of their attributes those that are given, in one step.

        Parameters
        ----------
        ids
            Of vectors that are in the index, each once.
        vectors
            As in :meth:`add`, one for each id.
        attributes
            As in :meth:`build`. An attribute that is not given keeps its values: a column that is not there or, of a
            dict for each vector, a name that its dict has not. None as a value is null.

        Raises
        ------
        KeyError, ValueError, TypeError, BudgetError
            As :meth:`remove` and :meth:`add`; nothing was changed.
        """
        writer = self._check_writable()
        names = as_ids(ids, self._about.id_kind)
        matrix = check_vectors(vectors, self.dimension, self._state.dtype)
        with writer.lock:
            self._state = writer.update(self._state, names, matrix, attributes)

    def commit(self, compact: bool | None = None) -> None:
        """Make everything that was added and removed durable, all of it or nothing.

        Parameters
        ----------
        compact
            Whether to :meth:`compact` as well. None lets a thread make the index anew, beside the calls that follow,
            once additions and removals exceed three tenths of the vectors that it was made for, or a twentieth and a
            list has grown to eight times the mean; not after :meth:`tune`, which it undoes. Until a later commit takes
            over what the thread has made, searches look further instead, so that recall stays that of a build.

        Warns
        -----
        UserWarning
            When the thread failed since the last commit, with its error. This commit is made all the same.

        Notes
        -----
        A commit writes what was added since the last one, and joins few rows that were written before; it leaves more
        to threads, and waits for these as long as they waited for it, where it follows close on another. What they
        have not finished at :meth:`close`, or when the process dies, is begun anew by the first commit of whoever opens
        the index next. ``stats()["renewal"]`` tells how it stands: ``none``, ``due`` (by the next commit), ``running``,
        ``ready`` (to be taken over by the next commit) or ``failed: ...``. The thread that makes the index anew takes
        the DRAM of a build on top of the budget, until a commit takes over what it made.
        """
        writer = self._check_writable()
        self._commit(writer, compact)
        for failure in writer.failures():
            warnings.warn(
                f"the index could not be made anew, or its parts joined, beside its commits: {failure!r}. What was "
                f"committed is there and found; it is tried again once more has changed, and compact() does it at once",
                stacklevel=user_stacklevel(),
            )

    @shielded
    def _commit(self, writer: IndexWriter, compact: bool | None) -> None:
        with writer.lock:
            self._state = writer.commit(self._state, compact)

    def compact(self) -> None:
        """Commit, and make the index anew: without what was removed, with lists, codes and calibration as built now.

        Searches go on meanwhile. Takes the time, DRAM and disk space of a build of the same vectors.
        """
        self.commit(compact=True)

    @shielded
    def tune(self, queries: npt.ArrayLike) -> None:
        """Calibrate recall for queries like these, and hold the pages they ask for most in DRAM where that pays.

        Parameters
        ----------
        queries
            ``[q, d]``, at least 64; a thousand are enough. They are compared with every vector, which is read once.

        Notes
        -----
        Durable where the index is open for writing. ValueError while no vector of the index is on SSD.
        """
        self._check_open()
        matrix, _ = check_queries(queries, self.dimension)
        if len(matrix) < _TUNE_LEAST:
            raise ValueError(f"queries has {len(matrix)} rows: expected at least {_TUNE_LEAST} to learn from")
        writer = self._writer
        with nullcontext() if writer is None else writer.lock:
            spare = self._about.dram - self._planned(self._state) - _TUNING_BYTES
            state = tune_snapshot(self._state, self._reader, matrix, spare)
            if writer is not None:
                writer.keep_tuning(state)
            self._state = state

    @shielded
    def save_to(self, path: str | PathLike[str]) -> None:
        """Copy what was last committed into the new directory `path`, while it is searched and changed."""
        self._check_open()
        self._store.copy(path)

    def _say_if_short(self, dram: int | str) -> None:
        """Warn where no effort that was calibrated at build reaches the recall of a search that asks for none."""
        reached = min(self._state.calibration.reached.values())
        if reached < TARGET - 0.01:
            coding = self._about.coding
            longer = codes_can_grow(self._state.preview.book.code_bytes, self.dimension, self.metric, coding)
            advice = f": more dram than {dram!r} makes longer codes" if longer else ""
            more = "give candidates= and nprobe=" if coding == "pq" else "searches for more compare vectors exactly"
            warnings.warn(
                f"calibration found a recall of {reached:.3f} at most, short of {TARGET}, on held-out vectors; "
                f"{more}, and read more for it{advice}",
                stacklevel=3,
            )

    def _load(self, reader: Reader) -> Snapshot:
        store, about = self._store, self._about
        preview = load_preview(store, about)
        dtype = np.dtype(about.dtype)
        row_bytes = about.row_bytes
        shape = about.lists, about.book_bytes, 2 if about.coding == "rabitq" else 0
        parts = tuple(self._files.load(each, shape, row_bytes, about.schema) for each in about.parts)
        fresh = Fresh.empty(about.space.dimension, dtype, about.id_kind == "str")
        files = {part.name: part.places.file for part in parts}
        hot = load_hot(reader, np.array(sorted(files[name] << 40 | page for name, page in about.hot), np.int64))
        return Snapshot(
            about.space, dtype, about.schema, preview, parts, fresh, about.calibration, hot, scan_bytes(about.dram)
        )

    def __repr__(self) -> str:
        return (
            f"ZoomIndex({str(self._store.path)!r}, {len(self)} x {self.dimension} {self._state.dtype}, {self.metric})"
        )

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes: codes, ids, lists with their centroids, checksums, read and work buffers."""
        return self._bytes_of(self._state)

    def _bytes_of(self, state: Snapshot) -> int:
        settle()  # files of parts that no snapshot has any more
        each = workspace_bytes(state.row_bytes) + scan_bytes(self._about.dram)
        if state.schema:  # a bitmap of what its filter leaves
            each += sum(bitmap_bytes(len(part)) for part in state.parts)
        buffers = self._about.searches * each
        held = state.preview.memory_bytes + sum(part.memory_bytes for part in state.parts) + state.fresh.memory_bytes
        held += state.hot.memory_bytes + self._cache.memory_bytes
        return held + self._store.memory_bytes + self._reader.memory_bytes + buffers

    def _planned(self, state: Snapshot) -> int:
        """Return what an index with a snapshot comes to hold: once as many search as may, with filters, and remove."""
        idle = min(self._about.searches, CONTEXTS_MOST) * self._reader.planned_bytes - self._reader.memory_bytes
        filters = self._cache.limit - self._cache.memory_bytes if state.schema else 0
        # What was removed, as it is and as it will be.
        removals = sum(bitmap_bytes(len(part)) * (1 + (part.alive is None)) for part in state.parts)
        joins = 0 if self._writer is None else self._writer.beside_bytes
        return self._bytes_of(state) + max(0, idle) + filters + removals * (self._about.coding == "rabitq") + joins

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: sizes, what a search takes by default, and what the reader has done since open."""
        state, about = self._state, self._about
        effort, _ = state.calibration.effort(10, TARGET)
        segments = self._store.segments().values()
        return {
            "vectors": len(self),
            "dimension": self.dimension,
            "dtype": about.dtype,
            "metric": self.metric,
            "preview": about.coding,
            "id_kind": about.id_kind,
            "lists": state.preview.lists,
            "parts": len(state.parts),
            "code_bytes": state.preview.book.code_bytes,
            "memory_bytes": self.memory_bytes,
            "dram": about.dram,
            "vector_bytes": len(self) * state.row_bytes,
            "file_bytes": sum(segment.length for segment in segments),
            "nprobe": effort.nprobe,
            "candidates": effort.candidates,
            "calibrated_recall": min(state.calibration.reached.values()),
            "calibrated_vectors": state.calibration.vectors,
            "renewal": "none" if self._writer is None else self._writer.renewal(state),
            **self._reader.stats(),
        }

    @shielded
    def check(self) -> list[str]:
        """Read the whole index and return every inconsistency found, empty when there is none."""
        self._check_open()
        # What a killed writer left takes space until the next one; it is no part of the index.
        found = [str(problem) for problem in self._store.check() if not problem.harmless]
        if found:  # among them may be pages of what would now be read
            return found
        strangers = [(part.name, part.strangers()) for part in self._state.parts]
        return [f"part {name}: {count} ids are not those of their rows" for name, count in strangers if count]

    @shielded
    def close(self) -> None:
        """Release files and memory; further calls raise :class:`ClosedError`. May be called twice."""
        with nullcontext() if self._writer is None else self._writer.lock:
            self._closed = True
            if self._writer is not None:
                self._writer.close()
            self._reader.close()
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_writable(self) -> IndexWriter:
        self._check_open()
        if self._about.coding == "pq":
            raise ValueError(
                "an index with preview='pq', the paper's form, is not changed: build with preview='rabitq'"
            )
        if self._writer is None:
            raise OSError(
                errno.EROFS,
                "the index is open for searching; pass writable=True to ZoomIndex.open",
                str(self._store.path),
            )
        return self._writer


def _held_of_attributes(store: Store, about: Description) -> int:
    """Return the DRAM that attributes take beside the bitmaps of filters: what is known of columns, and checksums."""
    checksums = sum(info.memory_bytes for name, info in store.segments().items() if "-a-" in name)
    return checksums + COLUMN_BYTES * len(about.schema) * len(about.parts)
