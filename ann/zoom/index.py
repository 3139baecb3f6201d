"""ZoomIndex: search more vectors than fit in DRAM (Zoom, arXiv 1809.04067, and later work)."""

import re
import shutil
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from os import PathLike
from pathlib import Path
from threading import RLock
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.arguments import (
    SearchOptions,
    check_either,
    check_fields,
    check_given,
    check_options,
    check_queries,
    check_query,
    check_values_of_all,
    check_vectors,
)
from memhier.ann.zoom.audit.audit import Auditor, audit_bytes
from memhier.ann.zoom.audit.audited import AuditedVectors
from memhier.ann.zoom.audit.record import AuditRecord
from memhier.ann.zoom.calibration.calibration import TARGET
from memhier.ann.zoom.construction.build import BuildOptions, write_index
from memhier.ann.zoom.filters.attributes import COLUMN_BYTES, merge_schema
from memhier.ann.zoom.filters.bitmaps import BitmapCache
from memhier.ann.zoom.filters.stored_lists import ITEMS
from memhier.ann.zoom.ids.collection import collected
from memhier.ann.zoom.preview.preview import CODINGS, Coding
from memhier.ann.zoom.preview.space import METRICS, Metric
from memhier.ann.zoom.renewal.beside import warn_of
from memhier.ann.zoom.renewal.life import IndexWriter
from memhier.ann.zoom.renewal.measuring import Measured
from memhier.ann.zoom.renewal.tune import tune_snapshot
from memhier.ann.zoom.search.explanation import Explanation
from memhier.ann.zoom.search.grouped import query_groups
from memhier.ann.zoom.search.results import Chosen, RangeResult, SearchResult, iterate
from memhier.ann.zoom.search.searcher import Searcher
from memhier.ann.zoom.storage.catalog import AUDIT_KEY, KIND, Description
from memhier.ann.zoom.storage.ids import as_ids, locate, refuse_clashes, with_repeats
from memhier.ann.zoom.storage.layout import (
    attribute_bytes,
    codes_can_grow,
    filters_bytes,
    index_reader,
    scan_bytes,
    wave_bytes,
)
from memhier.ann.zoom.storage.part import PartFiles
from memhier.ann.zoom.storage.prepared import PREPARED, Decision, check_decision, published_mark, settle_prepared
from memhier.ann.zoom.storage.rows import misposted
from memhier.ann.zoom.storage.snapshot import Footprint, IndexSnapshot
from memhier.arguments import check_here, check_int, check_number, counted
from memhier.budget import parse_bytes
from memhier.closing import Closing
from memhier.errors import ClosedError, FormatError
from memhier.io.page_file import PAGE_BYTES
from memhier.io.reader import Reader
from memhier.shield import close_made, shielded, shielded_giving, when_gone
from memhier.store.store import CACHE_BYTES, Store, Transfer, Verify

__all__ = ["ZoomIndex"]

_TUNING_BYTES = PAGE_BYTES  # that the catalog may grow by, beside the hot pages named in it
_TUNE_LEAST = 64
_FLOAT32_MAX = float(np.finfo(np.float32).max)


class ZoomIndex(Closing):
    """A vector index with a compressed preview in DRAM and the full vectors on SSD.

    A search scans codes in DRAM, reads the full vectors that their bounds cannot exclude, and ranks those exactly.
    :meth:`build` makes an index, :meth:`open` opens it. Searches may run from several threads at once.

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

    def __init__(self, store: Store, audit: float = 0.0, pool: bool = True) -> None:
        if not isinstance(store, Store):
            raise TypeError(f"store={store!r}: expected a Store; ZoomIndex.open(path) opens an index, build makes one")
        self._store = store
        raw = store.get("index")
        if raw is None:
            raise FormatError(f"{store.path}: the catalog does not describe an index")
        about = self._about = Description.decode(raw, store.path)
        self._reader = reader = index_reader(about.dram, about.searches, about.on_ssd)
        try:
            self._footprint, files = _files_of(store, reader, about, pool)
            self._searcher = Searcher(IndexSnapshot.load(store, about, files, reader), reader, about.searches)
        except BaseException:
            reader.close()
            raise
        self._closed = False
        self._writer = IndexWriter(store, reader, files, about, self._footprint) if store.writable else None
        self._lock = RLock() if self._writer is None else self._writer.lock
        if self._writer is not None:
            self._writer.when_measured(partial(_use_measured, weakref.ref(self._searcher), weakref.ref(self._writer)))
        try:
            self._pool = pool
            self._audit = self._start_audit(audit) if audit else None
            self._fit_pool()
        except BaseException:
            reader.close()
            raise

    @classmethod
    def build(
        cls,
        path: str | PathLike[str],
        vectors: object,
        *,
        ids: object = None,
        attributes: Any = None,
        documents: Any = None,
        metric: Metric = "l2",
        preview: Coding = "rabitq",
        dram: int | str = "64MiB",
        grow_to: int = 0,
        seed: int = 0,
        progress: bool = False,
    ) -> Self:
        """Build an index in the new directory `path` and return it open.

        The last step is atomic, and no index appears under `path` before it. A build that was killed leaves a directory
        that :meth:`open` refuses and that the next build takes over.

        Parameters
        ----------
        path
            A directory that does not exist yet, in a folder that does.
        vectors
            A matrix ``[n, d]``: an array, memmap or h5py data set; a torch tensor of any device and float type; an
            array of CuPy or any other library with DLPack; lists of Arrow, chunked or not; a Series of pandas or a list
            that holds vectors; a column of a Hugging Face data set. Or a file, or URL of a Parquet file, that
            :func:`memhier.ann.open_vectors` reads. Or an iterator of blocks ``[rows, d]`` or of vectors ``[d]``, such
            as a column of an iterable data set. The dtype is float32, float16, int8 or uint8. The index stores other
            floats, and other integers, as float32; it refuses integers that float32 does not hold exactly, nulls and
            rows of unlike lengths. ``[0, d]`` makes an index to be filled by :meth:`add`; give `grow_to` then. The
            build reads vectors in blocks and never holds them all. Its private memory does not grow with their number:
            it takes at most 8 times `dram` and 192 MiB, and 256 KiB for each dimension beyond 128. Where most vectors
            crowd in one place, it also takes a copy of the sample, up to 256 MiB. The sample and all arrays with an
            entry for each vector are files beside the index, mapped into memory; the system takes their pages back
            where others need them. Together with the vectors that are being sorted, they take up to three times the
            vectors' size on disk.
        ids
            Integers ``[n]`` other than -1, or strings of 1 to 1,024 bytes, each once; 0 to n - 1 when not given. The
            index keeps ids of that type.
        attributes
            Values that searches may filter by: ``{name: values}``, a table of pandas, polars or pyarrow, or a dict per
            vector. A value is an integer, float, bool, text or datetime, a list of one of these, or None. Searches
            return them, too, with ``fields=``.
        documents
            Values that searches return with ``fields=``, but do not filter by: text, bytes, or any JSON value (dict,
            list, number, bool; a tuple becomes a list). They have the forms of `attributes`. The values of a name, or
            the dicts, may also be an iterator; beside an iterator of blocks of vectors, as many values are taken after
            each block, so that no column is ever held. Documents lie on SSD in the order of the lists; DRAM holds 8
            bytes for each 4,096 of theirs. Those of one vector may take a thirty-second of `dram`, up to 8 MiB.
        metric
            ``"l2"``, ``"ip"`` (inner product) or ``"cosine"``.
        preview
            ``"rabitq"``: codes of a few bits a dimension with bounds, so that a search reads only the vectors that it
            needs and keeps a declared recall. ``"pq"``: product-quantised codes, the paper's form, with which a search
            reads a fixed number of candidates; such an index cannot be changed or filtered.
        dram
            The DRAM that the open index may hold, as bytes or text such as ``"64MiB"``. It covers codes, ids, lists,
            checksums, the buffers and filters of all searches that run at a time, marks of removed rows, vectors that
            wait to be written, and the work of :meth:`add`, :meth:`remove`, :meth:`update` and :meth:`commit`. It does
            not cover arguments and results of calls, Python's own objects, and :meth:`tune` and :meth:`compact` while
            they run, which take the DRAM of a build, also where a commit lets a thread compact or measures efforts
            anew. The build chooses the
            longest codes that fit: longer codes let a search read less for the same recall. Where codes of half a bit a
            dimension do not fit, codes and ids stay on SSD, and a search reads those of the lists that it probes.
            Then looking for ids (``in``, :meth:`fetch`, :meth:`update`, :meth:`remove`, `allow`) reads all ids from
            SSD, and joins of parts, which :meth:`commit` makes, take their DRAM on top like :meth:`compact`. DRAM that
            is left holds pages that searches have read; where it holds all, a search reads nothing in the end.
        grow_to
            The number of vectors that the index is to hold in that DRAM later, if larger than now. Without it, half of
            the DRAM that the longest codes leave holds buffers for more searches at a time, up to eight.
        seed
            Fixes sampling and training; equal input and seed give an equal index.
        progress
            Show a progress bar.

        Raises
        ------
        FileExistsError
            When `path` holds anything already.
        FileNotFoundError
            When the folder of `path` does not exist.
        BudgetError
            When `dram` is too small; the message names a budget that is enough.
        ValueError, TypeError
            When vectors, ids, attributes or documents cannot be indexed. Nothing is left behind.
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
            check_int("grow_to", grow_to, 0),
            check_int("seed", seed, 0, 2**31 - 2, "(the limit of faiss)"),
            progress,
        )
        if (names := None if ids is None else as_ids(ids, None)) is not None:
            refuse_clashes(names)
        check_here(path, "build it in a folder, and push it")
        place = Path(path).absolute()  # a source of vectors may change the working directory
        existed = place.exists()
        try:
            with Store.create(place, kind=KIND) as store:
                write_index(store, vectors, names, attributes, documents, options)
        except BaseException:
            if not existed:
                shutil.rmtree(place, ignore_errors=True)
            raise
        index = cls.open(place, writable=True)
        try:
            _warn_if_short(index, dram)
        except BaseException:
            index.close()
            raise
        return index

    @classmethod
    @shielded_giving(close_made)
    def open(
        cls,
        path: str | PathLike[str],
        *,
        writable: bool = False,
        verify: Verify = "read",
        cache: str | PathLike[str] | None = None,
        cache_bytes: int | str = CACHE_BYTES,
        settle: Decision | None = None,
        audit: float = 0.0,
        pool: bool = True,
    ) -> Self:
        """Open the index at `path`.

        Parameters
        ----------
        path
            A directory made by :meth:`build`, or the URL of a backup to search in place, such as
            ``"s3://bucket/index"``.
        writable
            Whether it may be changed, by one process at a time. Any number of processes may search it meanwhile, each
            in the state that was committed when it opened the index, or at its last :meth:`refresh`.
        verify
            ``"read"`` checks each page of vectors as it is read, ``"open"`` checks the whole index now as well,
            ``"off"`` trusts the disk. Opening checks codes and lists unless it is ``"off"``.
        cache, cache_bytes
            The directory on SSD that keeps pages read from a backup, and the most that they take there; see
            :meth:`memhier.Store.open`.
        settle
            With `writable`, where a commit was prepared (:meth:`prepare`) and neither published nor withdrawn: says for
            its mark whether the commit was made. Such an index is refused without it.
        audit
            The share of queries, from 0 to 1, that a thread of low priority searches again, exactly, to learn which
            recall they found: ``stats()["audit"]``. Where that is less than declared, or after 1,000 queries clearly
            more, the thread calibrates for the last 1,000 of these queries, as :meth:`tune` does, without its choice of
            pages to hold. Its DRAM is part of `dram`; that of tuning comes on top. The result, and all counts, are
            durable if the index is `writable`; otherwise they last until :meth:`close`. Searches at recall 1, with
            limits, a radius or lists of ids are not checked.
        pool
            Whether the rest of the index's DRAM holds pages that searches have read. Results do not depend on it.

        Raises
        ------
        FileNotFoundError, FormatError, CorruptionError
            When there is no index at `path`, or it is damaged.
        LockedError
            When `writable` is true and another process has it open for writing, or `settle` is missing.
        BudgetError, ValueError
            When `audit` has no room in the index's DRAM, is no share, or the index has ``preview="pq"``.
        """
        check_decision(settle)
        share = check_number("audit", audit, 0, 1)
        store = Store.open(path, kind=KIND, writable=writable, verify=verify, cache=cache, cache_bytes=cache_bytes)
        try:
            if writable:
                settle_prepared(store, settle)
            return cls(store, share, pool)
        except BaseException:
            store.close()
            raise

    def _start_audit(self, share: float) -> Auditor:
        if self._about.coding != "rabitq":
            raise ValueError(f"audit={share}: an exact search needs bounds, which preview='pq' does not have")
        state, about, writer = self._searcher.state, self._about, self._writer
        room = audit_bytes(self.dimension, self.dimension, about.dram - self._needed() - _TUNING_BYTES)
        index = AuditedVectors(self._searcher, self._reader, writer, self._lock)
        counts = AuditRecord.load(self._store.get(AUDIT_KEY), index.efforts(state), index.plain, self._store.path)
        self._footprint.audit_bytes = room
        if writer is not None:
            writer.record = counts.encode
        audit = Auditor(share, about.seed, index, room=room, counts=counts)
        when_gone(self, audit.stop)
        return audit

    @shielded
    def refresh(self) -> bool:
        """Take over the newest commit of another process; return whether there was one.

        For an index that is open for reading; one that is open for writing has all commits. Searches go on meanwhile,
        each in the state that it began with. After an error everything goes on in the old state. The calibration of the
        commit replaces that of :meth:`tune` here. A backup is looked up at its URL again.

        Raises
        ------
        FormatError
            When another index lies there now, of another shape or budget.
        FileNotFoundError, CorruptionError
            As :meth:`open`.

        Notes
        -----
        Without a newer commit it reads no file. Otherwise it reads the codes of new parts, and takes their DRAM
        beside `dram` until the last search of the state before has ended: after a rebuild, that of all codes.

        Examples
        --------
        >>> import numpy as np, tempfile
        >>> from memhier.ann import ZoomIndex
        >>> path = tempfile.mkdtemp() + "/index"
        >>> writer = ZoomIndex.build(path, np.eye(4, dtype="float32"), dram="1MiB", grow_to=10)
        >>> reader = ZoomIndex.open(path)
        >>> ids = writer.add(np.ones((1, 4)))
        >>> writer.commit()
        >>> len(reader), reader.refresh(), len(reader), reader.refresh()
        (4, True, 5, False)
        >>> reader.close()
        >>> writer.close()
        """
        with self._lock:
            self._check_open()
            following = self._store.newer()
            if following is None:
                return False
            try:
                self._take_over(following)
            except BaseException:
                following.close()
                raise
            return True

    def _take_over(self, following: Store) -> None:
        """Go on with another commit of the index."""
        store, raw = self._store, following.get("index")
        about = None if raw is None else Description.decode(raw, following.path)
        if about is None or _shape(about) != _shape(self._about):
            raise FormatError(f"{store.path}: another index lies there now; open it with ZoomIndex.open")
        footprint, files = _files_of(following, self._reader, about, self._pool)
        known = self._searcher.state.arrays_in(store, following)
        self._searcher.state = IndexSnapshot.load(following, about, files, self._reader, known)
        footprint.audit_bytes = self._footprint.audit_bytes
        self._store, self._about, self._footprint = following, about, footprint
        store.leave()
        self._fit_pool()

    def search(
        self,
        queries: object,
        k: int,
        *,
        recall: float | None = None,
        where: str | Sequence[str | None] | None = None,
        candidates: int | None = None,
        nprobe: int | None = None,
        max_reads: int | None = None,
        deadline_ms: float | None = None,
        fields: bool | Sequence[str] | None = None,
        radius: float | npt.ArrayLike | None = None,
        allow: object = None,
        deny: object = None,
    ) -> SearchResult:
        """Return the `k` nearest vectors of each query.

        The result unpacks in the order of faiss: ``distances, ids = index.search(queries, k)``.

        Parameters
        ----------
        queries
            ``[q, d]``, or ``[d]`` for one, in any container that :meth:`build` takes; any real dtype, compared as
            float32.
        k
            Number of neighbours. Where the index or a filter leaves fewer, ids of -1 (None for strings) at infinity
            follow.
        recall
            The mean share of the true neighbours to find, above 0 and at most 1; 0.99 by default. The build calibrates
            the effort on held-out vectors (see :meth:`tune` for queries of another kind). A search follows the distance
            of a query's own neighbours, so it looks further for a query unlike those vectors, and under a filter. Where
            no calibrated effort is enough, it looks wider, in the end exactly: ``stats["escalated"]``. At 1 it
            also scans every list, and reads every vector that may be nearer than those found even if its code were
            wrong by eight standard errors.
        where
            A filter on attributes, such as ``"price < 10 and tags contains 'new'"``: only vectors that fulfil it are
            searched. A list has a filter, or None, for each query; equal filters are evaluated once, and each query
            finds the vectors of a call with its filter alone.
        candidates
            Instead of a recall: read this many of the nearest by their codes, at least `k`, whatever their bounds. All
            vectors and all lists give the result of exact search.
        nprobe
            Instead of a recall: inverted lists scanned per query. More are scanned where these hold fewer than `k`
            vectors.
        max_reads
            The most pages of vectors read for one query, whether DRAM holds them or not, as results do not depend on
            that. Pages of codes on SSD do not count.
        deadline_ms
            Milliseconds after which no further round of reads starts; the search returns the nearest ranked until then.
        fields
            Attributes and documents to return with the vectors found: a list of names, or True for all. They are read
            once the vectors are found, those of all queries together, and beyond `max_reads` and `deadline_ms`;
            ``result.rows()`` has them as dicts.
        radius
            The largest distance wanted, as :class:`SearchResult` has them, or one for each query, ``[q]``. Farther
            vectors are left out, and those whose bounds say so are not read. Where fewer than `k` are as near, ids of
            -1 follow.
        allow, deny
            Ids: search only these vectors, or all but these. Any collection of them does: a list, set, view of a dict,
            iterator, column of a table, or an array of any shape. Ids that are not in the index are ignored, and so are
            the -1 and None of results: ``deny=result.ids`` works as it is. They come on top of `where`. A list of
            collections, or None, has those of each query; a collection that stands there several times counts once. A
            list of None alone, one for each query of a batch, sets no limit. Every search passes over all ids, and
            takes a bit for each vector, beyond `dram` where the index has no attributes.

        Warns
        -----
        RecallWarning
            When limits, or codes without bounds (``preview="pq"``), keep a search from the recall asked for; once for
            each cause. ``stats["recall"]`` is the recall that it keeps.

        Raises
        ------
        ValueError, TypeError
            When the dimension is wrong, a query holds NaN or infinity, or a number is out of range.
        CorruptionError
            When a page read from SSD differs from the page written.
        """
        first = where[0] if isinstance(where, list) and len(where) == 1 else where
        one = first if isinstance(first, str) else None
        options = SearchOptions(k, recall, one, candidates, nprobe, max_reads, deadline_ms, fields, radius, allow, deny)
        return self._search(queries, options, where=where)

    def _search(
        self, queries: object, options: SearchOptions, chosen: Chosen | None = None, where: object = None
    ) -> SearchResult:
        """Search with options; a filter, or one for each query, comes as `where`, and one alone in them, too."""
        self._check_open()
        matrix, single = check_queries(queries, self.dimension)
        if len(matrix) == 1 and options.where is not None:  # the filter of all its queries
            where = options.where
        if groups := query_groups(where, options.allow, options.deny, len(matrix), single=single):
            found = self._searcher.search_each(matrix, options, groups)
        else:
            found = self._searcher.search(matrix, options, chosen)
        if not single:
            return found
        columns = {name: column[0] for name, column in found.fields.items()} if found.fields else {}
        return SearchResult(found.ids[0], found.distances[0], found.stats, columns)

    def range_search(
        self,
        queries: object,
        radius: float,
        *,
        recall: float | None = None,
        where: str | None = None,
        fields: bool | Sequence[str] | None = None,
        allow: object = None,
        deny: object = None,
    ) -> RangeResult:
        """Return all vectors within `radius` of each query.

        The result unpacks in the order of faiss: ``offsets, distances, ids = index.range_search(queries, radius)``.

        Parameters
        ----------
        queries
            ``[q, d]``, or ``[d]`` for one.
        radius
            The largest distance, as :class:`SearchResult` has them: squared for ``l2``, negative for inner products
            above zero.
        recall, where
            As in :meth:`search`. The search takes the widest bounds that any number of neighbours needs for the recall,
            as the number of vectors within a radius is not known.
        fields, allow, deny
            As in :meth:`search`.

        Raises
        ------
        ValueError, TypeError
            When an argument is no radius, recall, filter or array of queries of this index, or the index has
            ``preview="pq"``, whose codes have no bounds.
        """
        self._check_open()
        if self._about.coding != "rabitq":
            raise ValueError("range_search needs bounds, which preview='pq' does not have: build with preview='rabitq'")
        matrix, _ = check_queries(queries, self.dimension)
        radii = np.full(len(matrix), check_number("radius", radius, -_FLOAT32_MAX, _FLOAT32_MAX), np.float32)
        options = SearchOptions(1, recall, where, fields=fields, allow=allow, deny=deny)
        return self._searcher.search_range(matrix, radii, options)

    def search_iter(self, query: object, batch: int = 10, **options: Any) -> Iterator[SearchResult]:
        """Yield neighbours of one query, `batch` at a time and each once, the nearest first, until there are no more.

        Every round searches for twice as many; the fields of a neighbour are read once. A later batch may hold a
        neighbour that a recall below 1 missed before, and may or may not hold vectors that are added or removed
        meanwhile.

        Parameters
        ----------
        query
            ``[d]``.
        batch
            How many are yielded at a time; the last batch may hold fewer.
        **options
            As in :meth:`search`.
        """
        query = check_query(query, self.dimension)
        size = check_int("batch", batch, 1)
        check_options(options)
        for name in ("allow", "deny"):  # every batch is a search, and an iterator is used up by the first
            if options.get(name) is not None:
                options[name] = collected(options[name], name)
        SearchOptions(size, **options)  # refused here, and not by the first batch

        def nearest(k: int, chosen: Chosen) -> SearchResult:
            k = min(k, max(1, len(self)))
            if (wanted := options.get("candidates")) is None:
                return self._search(query, SearchOptions(k, **options), chosen)
            most = max(k, check_int("candidates", wanted, min(size, k)))  # as many as are to be found
            return self._search(query, SearchOptions(k, **options | {"candidates": most}), chosen)

        return iterate(nearest, size)

    def explain(self, query: object, k: int = 10, **options: Any) -> Explanation:
        """Search for one query and tell its steps: lists scanned, candidates admitted, pages read, why it stopped.

        :attr:`Explanation.records` says of each candidate by which bounds it was admitted or refused, and whether its
        page was read. The search is that of :meth:`search`. Afterwards the account scans the same lists once more and
        reads the pages of the vectors in it again. It has at most 4,096 records, or twice `k` where that is more,
        and one for each vector found beyond these. A record takes half a KiB.

        Parameters
        ----------
        query
            ``[d]``.
        k, **options
            As in :meth:`search`.
        """
        query = check_query(query, self.dimension)
        self._check_open()
        check_options(options)
        return self._searcher.explain(query, SearchOptions(k, **options))

    def reconstruct(self, ids: object) -> npt.NDArray[Any]:
        """Return the vectors of these ids, which may repeat, as they are stored: ``[n, d]``.

        Raises
        ------
        KeyError
            For an id that is not in the index.
        """
        self._check_open()
        state = self._searcher.state
        wanted, inverse = with_repeats(ids, state.id_kind)
        return state.vectors_of(wanted, self._reader)[inverse]

    def blocks(self) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """Return ids and vectors of the whole index, as it is now, in blocks of some MiB in the order on SSD.

        Yields
        ------
        ids, vectors
            int64, or strings as objects, ``[n]``; the vectors as they are stored, ``[n, d]``.

        Raises
        ------
        CorruptionError
            When a page read from SSD differs from the page written.
        """
        self._check_open()
        return self._searcher.state.blocks(self._reader)

    def ids(self, where: str | None = None) -> Iterator[npt.NDArray[Any]]:
        """Return all ids of the index, as it is now, some thousand at a time, in the order of the vectors on SSD.

        Parameters
        ----------
        where
            A filter as in :meth:`search`: only the ids of vectors that fulfil it. They take a bit for each vector,
            beyond `dram`, until the end.

        Yields
        ------
        numpy.ndarray
            int64, or strings as objects, ``[n]``.

        Raises
        ------
        ValueError, TypeError
            When `where` is no filter of this index.

        Examples
        --------
        >>> import numpy as np, tempfile
        >>> from memhier.ann import ZoomIndex
        >>> path = tempfile.mkdtemp() + "/index"
        >>> with ZoomIndex.build(path, np.eye(4), attributes={"price": [5, 2, 7, 1]}, dram="1MiB") as index:
        ...     sorted(np.concatenate([*index.ids("price > 4")]).tolist())
        [0, 2]
        """
        self._check_open()
        if where is None:
            return self._searcher.state.ids()
        with self._searcher.selected(where) as (state, selected, fresh):
            return state.ids(selected, fresh)

    def fetch(self, ids: object, fields: bool | Sequence[str] = True) -> dict[str, npt.NDArray[Any]]:
        """Return attributes and documents of ids, which may repeat, ``[n]`` each by name, in the order of `ids`.

        Their types are those of :attr:`SearchResult.fields`. Every look-up passes over all ids.

        Parameters
        ----------
        ids
            Integers or strings ``[n]``, of the index's type.
        fields
            As in :meth:`search`.

        Raises
        ------
        KeyError
            For an id that is not in the index.
        ValueError
            For a field that the index does not have.
        """
        self._check_open()
        check_fields(fields)
        return self._searcher.fetch(ids, fields)

    def contains(self, ids: object) -> npt.NDArray[np.bool_]:
        """Return whether a vector has each of these ids, which may repeat, bool ``[n]``.

        Raises
        ------
        ValueError, TypeError
            For ids that no vector can have, or of another type than those of the index.
        """
        self._check_open()
        state = self._searcher.state
        wanted, inverse = with_repeats(ids, state.id_kind)
        return locate(state.parts, state.fresh, wanted).known[inverse]

    def __contains__(self, name: object) -> bool:
        """Whether a vector has this id. Every look-up passes over all ids: to ask for many, use `contains`.

        Raises
        ------
        TypeError
            When the ids of the index are of another type.
        """
        self._check_open()
        state = self._searcher.state
        try:
            wanted = as_ids([name], state.id_kind, "id")
        except ValueError:  # an id that no vector can have
            return False
        return bool(locate(state.parts, state.fresh, wanted).known[0])

    @shielded
    def add(
        self, vectors: object, ids: object = None, attributes: Any = None, documents: Any = None
    ) -> npt.NDArray[Any]:
        """Add vectors. Searches find them at once; :meth:`commit` makes them durable.

        Parameters
        ----------
        vectors
            ``[n, d]``, or ``[d]`` for one, in any container that :meth:`build` takes, that fit the dtype of the index.
        ids
            Integers or strings ``[n]``, of the index's type, that are not in it; the next free integers when not given.
        attributes
            As in :meth:`build`. A new attribute is null for all vectors before.
        documents
            As in :meth:`build`, without iterators. Documents of new names are None for all vectors before.

        Returns
        -------
        numpy.ndarray
            int64, or strings as objects, ``[n]``: the ids.

        Raises
        ------
        BudgetError
            When the DRAM given at build is too small for them; nothing was added.
        ValueError, TypeError
            When vectors, ids, attributes or documents do not fit; nothing was added.
        """
        writer = self._check_writable()
        matrix = check_vectors(vectors, self.dimension, self._searcher.state.dtype)
        names = None if ids is None else as_ids(ids, self._about.id_kind)
        with writer.lock:
            self._searcher.state, found = writer.add(self._searcher.state, matrix, names, attributes, documents)
        return found.values()

    @shielded
    def remove(self, ids: object = None, *, where: str | None = None) -> int:
        """Remove vectors by id or by a filter, and return how many. Searches no longer find them.

        :meth:`commit` makes it durable.

        Parameters
        ----------
        ids
            Integers or strings ``[n]``, of the index's type.
        where
            Instead of ids: a filter as in :meth:`search`. It reads its columns and no vector.

        Raises
        ------
        KeyError
            For an id that is not in the index; nothing was removed.
        ValueError, TypeError
            When there are neither ids nor a filter, or both, or the filter is none of this index.
        """
        writer = self._check_writable()
        check_either(ids, where)
        if where is not None:
            with writer.lock, self._searcher.selected(where) as (state, selected, fresh):
                self._searcher.state, count = writer.remove_selected(state, selected, fresh)
            return count
        names = as_ids(ids, self._about.id_kind)
        with writer.lock:
            self._searcher.state = writer.remove(self._searcher.state, names)
        return len(names)

    @shielded
    def update(
        self, ids: object = None, vectors: object = None, attributes: Any = None, documents: Any = None, *,
        where: str | None = None,
    ) -> int:  # fmt: skip
        """Replace vectors, attributes or documents, or some of these, in one step, and return of how many vectors.

        Parameters
        ----------
        ids
            Ids of vectors in the index, each once.
        vectors
            As in :meth:`add`, one for each id. Without them, the vectors stay. Attributes alone are written as new
            values of the columns that they name; with documents, the vectors are written anew beside their new fields,
            and so take room in the budget until :meth:`compact`, as new ones do.
        attributes
            As in :meth:`build`. Other attributes keep their values: a column that the table lacks or, with a dict for
            each vector, a name that its dict lacks. A value of None is null. With `where`, a dict with one value for
            each name, which all vectors get.
        documents
            As in :meth:`add`. Other documents stay, as attributes do.
        where
            Instead of ids: a filter as in :meth:`search`, of vectors that get other attributes. These are written some
            at a time, within the budget; searches see all of them change at once.

        Raises
        ------
        KeyError, ValueError, TypeError, BudgetError
            As :meth:`remove` and :meth:`add`; nothing was changed.

        Examples
        --------
        >>> import numpy as np, tempfile
        >>> from memhier.ann import ZoomIndex
        >>> path, fields = tempfile.mkdtemp() + "/index", {"price": [3, 20, 30], "label": ["new", "new", "old"]}
        >>> index = ZoomIndex.build(path, np.eye(3, dtype="float32"), attributes=fields, dram="2MiB")
        >>> index.update(where="price >= 20", attributes={"label": "dear"})
        2
        >>> index.fetch([0, 1, 2], ["label"])["label"].tolist()
        ['new', 'dear', 'dear']
        >>> index.close()
        """
        writer = self._check_writable()
        check_either(ids, where)
        if where is not None:
            return self._update_selected(writer, where, check_values_of_all(vectors, attributes, documents))
        names = as_ids(ids, self._about.id_kind)
        check_given(vectors, attributes, documents)
        matrix = None if vectors is None else check_vectors(vectors, self.dimension, self._searcher.state.dtype)
        with writer.lock:
            self._searcher.state, _ = writer.update(self._searcher.state, names, matrix, attributes, documents)
        return len(names)

    def _update_selected(self, writer: IndexWriter, where: str, values: dict[str, list[Any]]) -> int:
        with writer.lock:
            merge_schema(writer.about.schema, values, 1)  # also where the filter leaves no vector
            with self._searcher.selected(where) as (state, selected, fresh):
                self._searcher.state, count = writer.update_selected(state, selected, fresh, values)
        return count

    @shielded
    def upsert(self, ids: object, vectors: object, attributes: Any = None, documents: Any = None) -> int:
        """Replace the vectors that the index has, and add the others, in one step; return how many were added.

        Parameters
        ----------
        ids
            Integers or strings ``[n]``, of the index's type, each once.
        vectors
            As in :meth:`add`, one for each id.
        attributes, documents
            As in :meth:`update`. An added vector has null, or None, for those that are not given.

        Raises
        ------
        ValueError, TypeError, BudgetError
            As :meth:`add`; nothing was changed.
        """
        writer = self._check_writable()
        names = as_ids(ids, self._about.id_kind)
        matrix = check_vectors(vectors, self.dimension, self._searcher.state.dtype)
        with writer.lock:
            self._searcher.state, added = writer.update(
                self._searcher.state, names, matrix, attributes, documents, insert=True
            )
        return added

    def commit(self, compact: bool | None = None) -> None:
        """Make all additions and removals durable, all of them or none.

        Parameters
        ----------
        compact
            Whether to :meth:`compact` as well. With None, a thread rebuilds the index beside the calls that follow once
            additions and removals exceed three tenths of the vectors that it was built for, and lists or codes no
            longer fit; or a twentieth while a list has grown to eight times the mean, the vectors have doubled or
            halved, or removed ones stay for want of DRAM. It does not after :meth:`tune`, which a rebuild would undo.
            With False, the commit keeps within `dram`: nothing is rebuilt or measured, and searches look at all lists
            once a tenth has changed.

        Warns
        -----
        UserWarning
            When the thread failed since the last commit, with its error. This commit succeeds all the same.

        Notes
        -----
        Once a twentieth has changed, a thread measures again how far searches must look to keep the declared recall,
        and hands that over to the searches that follow. If a tenth changes before it does, they look at all lists; so
        they do between a large :meth:`add` and its commit, which measures at once. After :meth:`tune` nothing is
        measured.

        A commit writes the vectors added since the last one and joins few rows written before. It leaves larger joins
        to threads. A commit that follows close on another waits for a join as long as that waited for it, and for a
        rebuild two to four times as long: until it is done where no DRAM is left for changes like the last. Work
        that is unfinished at :meth:`close`, or when the process dies, starts again with the first commit after the next
        opening. ``stats()["renewal"]`` is the state of the rebuild: ``none``, ``due`` (by the next commit),
        ``running``, ``ready`` (for the next commit to take over) or ``failed: ...``. The rebuilding thread takes the
        DRAM of a build on top of the budget, until a commit takes over its result.
        """
        writer = self._check_writable()
        self._commit(writer, compact)
        warn_of(writer.failures())

    @shielded
    def _commit(self, writer: IndexWriter, compact: bool | None) -> None:
        with writer.lock:
            self._searcher.state = writer.commit(self._searcher.state, compact)
            self._fit_pool()

    @shielded
    def prepare(self, mark: int) -> None:
        """Do all of a commit that may fail, but publish nothing: the first half of a commit over several indexes.

        Once all indexes of a group have prepared, the group notes the mark in one place. That makes the commit. Then
        each index does the second half, :meth:`publish`. If one could not prepare, all call :meth:`withdraw`. An index
        that dies in between asks ``open(settle=)`` for the decision. Searches find the changes meanwhile, as they do
        before a commit; other changes are refused. Readers open the last commit published.

        Parameters
        ----------
        mark
            A number above that of the last commit published so.

        Raises
        ------
        ValueError
            When it is none, or a commit is prepared already.

        Examples
        --------
        >>> import numpy as np, tempfile
        >>> from memhier.ann import ZoomIndex
        >>> path = tempfile.mkdtemp() + "/index"
        >>> index = ZoomIndex.build(path, np.eye(4, dtype="float32"), dram="1MiB", grow_to=10)
        >>> ids = index.add(np.ones((1, 4)))
        >>> index.prepare(1)
        >>> index.publish()
        >>> index.mark
        1
        >>> index.close()
        """
        writer = self._check_writable()
        number = check_int("mark", mark, self.mark + 1)
        with writer.lock:
            self._searcher.state = writer.prepare(self._searcher.state, number)

    @shielded
    def publish(self) -> None:
        """Make the prepared commit the last one; see :meth:`prepare`.

        Raises
        ------
        ValueError
            When no commit is prepared.
        """
        writer = self._check_writable()
        with writer.lock:
            self._searcher.state = writer.publish(self._searcher.state)

    @shielded
    def withdraw(self) -> None:
        """Take the prepared commit back; its changes wait for another one. See :meth:`prepare`.

        Raises
        ------
        ValueError
            When no commit is prepared.
        """
        writer = self._check_writable()
        with writer.lock:
            self._searcher.state = writer.withdraw(self._searcher.state)

    @property
    def mark(self) -> int:
        """The mark of the last commit that was prepared and published; 0 if there was none."""
        return published_mark(self._store)

    def compact(self) -> None:
        """Commit, and rebuild the index: without removed vectors, with lists, codes and calibration as a build makes.

        Searches go on meanwhile. It takes the time, DRAM and disk space of a build of the same vectors.
        """
        self.commit(compact=True)

    @shielded
    def tune(self, queries: object) -> None:
        """Calibrate recall for queries like these, and hold the pages that they read most in DRAM where that pays.

        Parameters
        ----------
        queries
            ``[q, d]``, at least 64; a thousand are enough. They are compared with every vector, which is read once.

        Raises
        ------
        ValueError
            While no vector of the index is on SSD, or for fewer than 64 queries.

        Notes
        -----
        The result is durable if the index is open for writing.
        """
        self._check_open()
        matrix, _ = check_queries(queries, self.dimension)
        if len(matrix) < _TUNE_LEAST:
            raise ValueError(
                f"queries has {counted(len(matrix), 'row')}: expected at least {_TUNE_LEAST} to learn from"
            )
        writer = self._writer
        with self._lock:
            state = self._searcher.state
            room = self._about.dram - self._needed() - _TUNING_BYTES
            self._footprint.shrink_pool(self._about.dram)  # hot pages go first
            try:
                state = tune_snapshot(state, self._reader, matrix, room)
                if writer is not None:
                    writer.keep_tuning(state)
                self._searcher.state = state
            finally:
                self._fit_pool()

    @shielded
    def save_to(self, path: str | PathLike[str]) -> None:
        """Copy the last committed state into the new directory `path`, or to a URL as :meth:`push` does.

        Searches and changes go on meanwhile.
        """
        self._check_open()
        self._store.copy(path, leave_out=[PREPARED])

    def push(self, url: str, *, keep: int | None = None, verify: bool = False) -> Transfer:
        """Back up the last committed state to a URL; see :meth:`memhier.Store.push`."""
        self._check_open()
        return self._store.push(url, keep=keep, verify=verify, leave_out=[PREPARED])

    @staticmethod
    @shielded
    def pull(url: str, path: str | PathLike[str], *, generation: int | None = None) -> Transfer:
        """Restore a backup into the directory `path`; see :meth:`memhier.Store.pull`."""
        return Store.pull(url, path, kind=KIND, generation=generation)

    def __len__(self) -> int:
        return self._searcher.state.count

    def __repr__(self) -> str:
        return (
            f"ZoomIndex({str(self._store.path)!r}, {len(self)} x {self.dimension} {self._about.dtype}, {self.metric})"
        )

    @property
    def path(self) -> Path:
        """The directory of the index, absolute."""
        return self._store.path

    @property
    def dimension(self) -> int:
        """Dimension of a vector."""
        return self._about.space.dimension

    @property
    def metric(self) -> Metric:
        """The metric chosen at build."""
        return self._about.space.metric

    @property
    def fields(self) -> dict[str, str]:
        """Types by name: of attributes int64, float64, bool, str, datetime, or lists such as list[str]; "document"."""
        state = self._searcher.state
        return {**state.schema, **dict.fromkeys(state.documents, "document")}

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes: codes, ids, lists with their centroids, checksums, read and work buffers, pages."""
        return self._footprint.held(self._searcher.state)

    def _needed(self) -> int:
        """Return the most DRAM, without that of pages."""
        joins = 0 if self._writer is None else self._writer.beside_bytes
        return self._footprint.needed(self._searcher.state) + joins

    def _fit_pool(self) -> None:
        """Let pages take the DRAM that the index leaves."""
        self._footprint.fit_pool(self._needed())

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: sizes, the default effort of a search, and the reader's work since open.

        ``memory_bytes`` is the DRAM held now; ``planned_bytes`` is the most that it becomes while ``searches`` run at a
        time and vectors are removed. Both stay within ``dram``. ``longest_list`` is the longest list divided by the
        mean. ``audit`` is None without one; see :meth:`open`. ``pool_bytes`` is the DRAM for pages that were read, part
        of both; ``pool_pages`` are there now, and ``pool_hits`` were taken from there in place of a read.
        """
        state, about = self._searcher.state, self._about
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
            "longest_list": state.longest_list,
            "parts": len(state.parts),
            "code_bytes": state.preview.book.code_bytes,
            "codes": "ssd" if state.preview.on_ssd else "dram",
            "memory_bytes": self.memory_bytes,
            "planned_bytes": self._needed() + self._reader.pool_bytes,
            "pool_bytes": self._reader.pool_bytes,
            "dram": about.dram,
            "searches": about.searches,
            "vector_bytes": len(self) * state.row_bytes,
            "file_bytes": sum(segment.length for segment in segments),
            "nprobe": effort.nprobe,
            "candidates": effort.candidates,
            "calibrated_recall": min(state.calibration.reached.values()),
            "calibrated_vectors": state.calibration.vectors,
            "trained_vectors": (about if self._writer is None else self._writer.about).trained_on,
            "renewal": "none" if self._writer is None else self._writer.renewal(state),
            "audit": None if self._audit is None else self._audit.stats(),
            **self._reader.stats(),
        }

    @shielded
    def check(self) -> list[str]:
        """Read the whole index and return every inconsistency found, empty when there is none.

        It takes DRAM beyond `dram` for the items of a block of lists, at most 1,048,576.
        """
        self._check_open()
        # Files of a killed writer take space until the next one; they are no part of the index.
        found = [str(problem) for problem in self._store.check() if not problem.harmless]
        if found:  # the ids may lie on damaged pages
            return found
        parts = self._searcher.state.parts
        strangers = [(part.name, part.strangers()) for part in parts]
        found = [f"part {name}: {count} ids are not those of their rows" for name, count in strangers if count]
        return found + misposted(parts)

    @shielded
    def close(self) -> None:
        """Release files and memory; further calls raise :class:`ClosedError`. May be called twice."""
        audited = self._audit is not None and self._audit.end()  # before the lock, which it may wait for
        with self._lock:
            if self._writer is not None:
                if audited and not self._closed:
                    with suppress(Exception):  # files and memory are released all the same
                        self._writer.keep_record()
                self._writer.close()
            self._closed = True
            self._reader.close()
            self._store.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this ZoomIndex is closed: open it again with ZoomIndex.open")

    def _check_writable(self) -> IndexWriter:
        self._check_open()
        if self._about.coding == "pq":
            raise ValueError(
                "an index with preview='pq', the paper's form, is not changed: build with preview='rabitq'"
            )
        if self._writer is None:
            raise self._store.not_writable("the index is open for searching; pass writable=True to ZoomIndex.open")
        return self._writer


def _warn_if_short(index: ZoomIndex, dram: int | str) -> None:
    """Warn if no calibrated effort of a new index reaches the default recall."""
    stats = index.stats()
    if (reached := stats["calibrated_recall"]) >= TARGET - 0.01:
        return
    longer = codes_can_grow(stats["code_bytes"], index.dimension, index.metric, stats["preview"])
    advice = f": more dram than {dram!r} makes longer codes" if longer else ""
    more = "give candidates= and nprobe=" if stats["preview"] == "pq" else "searches for more compare vectors exactly"
    warnings.warn(
        f"calibration found a recall of {reached:.3f} at most, short of {TARGET}, on held-out vectors; "
        f"{more}, and read more for it{advice}",
        stacklevel=3,
    )


def _files_of(store: Store, reader: Reader, about: Description, pool: bool) -> tuple[Footprint, PartFiles]:
    """Return the count of the DRAM of an index, and the files of its parts."""
    cache = BitmapCache(max(1, attribute_bytes(about.dram) - _held_of_attributes(store, about)))
    footprint = Footprint(store, reader, cache, about, pool)
    return footprint, PartFiles(
        store,
        reader,
        cache,
        about.id_kind == "str",
        footprint.search_bytes - filters_bytes(scan_bytes(about.dram, about.searches)),
        wave_bytes(about.dram),
    )


def _shape(about: Description) -> tuple[object, ...]:
    """Return the facts that an open index keeps from commit to commit."""
    space = about.space
    return space.metric, space.dimension, about.dtype, about.coding, about.id_kind, about.dram, about.searches


def _held_of_attributes(store: Store, about: Description) -> int:
    """Return the DRAM that attributes take beside the bitmaps of filters: facts about columns, and checksums."""
    columns = re.compile(r"p[0-9]+-(a|[cr][0-9]+)-")
    names = [name for name in store.segments() if columns.match(name) and ITEMS not in name]  # items are planned apart
    checksums = sum(store.segments()[name].memory_bytes for name in names)
    return checksums + COLUMN_BYTES * len(about.schema) * len(about.parts)


def _use_measured(searcher: "weakref.ref[Searcher]", writer: "weakref.ref[IndexWriter]", measured: Measured) -> None:
    """Give searches the efforts that a thread has measured; it holds the lock of the writer, if there still is one."""
    if (of := searcher()) is not None and (by := writer()) is not None:
        of.state = by.use(of.state, measured)
