"""MultiVectorIndex: search items of many vectors by MaxSim, with their tokens on SSD."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from threading import RLock
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from memhier.ann.multivector.auditing import AuditedItems
from memhier.ann.multivector.build import ItemBuild, build_items
from memhier.ann.multivector.coding.book import TokenBook
from memhier.ann.multivector.explanation import ItemExplanation
from memhier.ann.multivector.items import GivenItems, as_queries
from memhier.ann.multivector.results import ItemResult
from memhier.ann.multivector.search import Allowed
from memhier.ann.multivector.searcher import ItemSearcher
from memhier.ann.multivector.storage.catalog import KIND, ItemDescription
from memhier.ann.multivector.storage.footprint import ItemFootprint
from memhier.ann.multivector.storage.layout import read_bytes
from memhier.ann.multivector.storage.part import PartOpener
from memhier.ann.multivector.storage.snapshot import ItemSnapshot, WaitingItems
from memhier.ann.multivector.storage.stored import item_blocks, tokens_of
from memhier.ann.multivector.tuning import tuned
from memhier.ann.multivector.writer import ItemWriter
from memhier.ann.zoom.arguments import SearchOptions, check_either, check_fields, check_given
from memhier.ann.zoom.audit.audit import Auditor, audit_bytes
from memhier.ann.zoom.audit.record import AuditRecord
from memhier.ann.zoom.filters.bitmaps import BitmapCache
from memhier.ann.zoom.renewal.beside import warn_of
from memhier.ann.zoom.search.fields import fields_of_ids
from memhier.ann.zoom.search.grouped import query_groups
from memhier.ann.zoom.storage.catalog import AUDIT_KEY
from memhier.ann.zoom.storage.ids import as_ids, locate, refuse_clashes, stream_ids, with_repeats
from memhier.ann.zoom.storage.layout import attribute_bytes, index_reader
from memhier.ann.zoom.storage.rows import misposted
from memhier.arguments import check_here, check_int, check_number
from memhier.budget import parse_bytes
from memhier.closing import Closing
from memhier.errors import ClosedError, FormatError
from memhier.io.reader import Reader
from memhier.shield import close_made, shielded, shielded_giving, when_gone
from memhier.store.store import CACHE_BYTES, Store, Transfer, Verify

__all__ = ["MultiVectorIndex"]

SEARCH_OPTIONS = frozenset({"recall", "where", "max_reads", "deadline_ms", "allow", "deny", "fields"})
_WORK_BYTES = 1 << 18  # of a running filter
_AUDITED_VECTORS = 4, 32  # of a query: for which an audit has to have room, and has where DRAM allows it


class MultiVectorIndex(Closing):
    """An index of items with many vectors each, such as the tokens of a passage or the patches of an image.

    The score of an item is MaxSim (ColBERT, arXiv 2004.12832): the sum, over the vectors of the query, of the largest
    inner product with a vector of the item. DRAM holds a code of a few bytes for each vector, SSD the vectors. A search
    finds candidates by lists of like vectors, estimates their scores from codes, reads the items that may be among the
    best, and ranks those exactly. :meth:`build` makes an index, :meth:`open` opens it. Searches may run from several
    threads at once.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from memhier.ann import MultiVectorIndex
    >>> random = np.random.default_rng(0)
    >>> items = [random.normal(size=(length, 32)).astype("float16") for length in random.integers(5, 40, 500)]
    >>> path = tempfile.mkdtemp() + "/index"
    >>> with MultiVectorIndex.build(path, items, dram="8MiB") as index:
    ...     index.search(items[7][:5], k=3).ids[0]
    np.int64(7)
    """

    def __init__(self, store: Store, audit: float = 0.0) -> None:
        if not isinstance(store, Store):
            raise TypeError(f"store={store!r}: expected a Store; MultiVectorIndex.open(path) opens an index")
        self._store = store
        about = self._about = ItemDescription.load(store)
        self._reader = reader = index_reader(about.dram, about.searches)
        try:
            self._footprint, opener, state = _opened(store, reader, about)
        except BaseException:
            reader.close()
            raise
        self._closed = False
        self._searcher = ItemSearcher(state, reader, about.searches)
        writable = store.writable
        self._writer = ItemWriter(store, reader, opener, about, self._footprint) if writable else None
        self._lock = RLock() if self._writer is None else self._writer.lock
        try:
            self._audit = self._start_audit(audit) if audit else None
        except BaseException:
            reader.close()
            raise

    @classmethod
    def build(
        cls,
        path: str | PathLike[str],
        items: Any,
        ids: object = None,
        *,
        lengths: object = None,
        attributes: Any = None,
        documents: Any = None,
        dram: int | str = "64MiB",
        grow_to: int = 0,
        seed: int = 0,
    ) -> Self:
        """Build an index in the new directory `path` and return it open.

        The last step is atomic, and no index appears under `path` before it.

        Parameters
        ----------
        path
            A directory that does not exist yet, in a folder that does.
        items
            A list of matrices ``[vectors, d]``, one for each item, or an array ``[items, vectors, d]``. With `lengths`,
            a matrix of the vectors of all items, end to end; a memmap is read in blocks, three times. The dtype is
            float32, float16, int8 or uint8; other floats, and other integers that float32 holds exactly, are stored as
            float32. Every item has at least one vector. ``np.empty((0, d), dtype)`` with ``lengths=[]`` makes an index
            to be filled by :meth:`add`; give `grow_to` then. The build takes DRAM for the codes, a sample for training
            of at most 256 MiB, twice, and some 50 bytes a vector.
        ids
            Integers ``[n]`` other than -1, or strings ``[n]`` of up to 1,024 bytes, each once; 0 to n - 1 when not
            given. DRAM holds 8 bytes for a string; the strings lie on SSD.
        lengths
            Integers ``[n]``: the number of vectors of each item, where `items` is one matrix.
        attributes
            Values that searches may filter by, as in :meth:`ZoomIndex.build <memhier.ann.ZoomIndex.build>`, one for
            each item.
        documents
            Texts, bytes or JSON values that searches return with their hits, as in :meth:`ZoomIndex.build
            <memhier.ann.ZoomIndex.build>`, one for each item. They lie on SSD.
        dram
            The DRAM that the open index may hold, as bytes or text such as ``"64MiB"``. It covers codes, lists, ids,
            checksums, the buffers of all searches that run at a time, filters, marks of removed items, items that wait
            to be written, and the coding of these. It does not cover arguments and results of calls, Python's own
            objects, and the joins and rebuilds of :meth:`commit`, which take the DRAM of a build of the items
            concerned. The build chooses the longest codes that fit: longer codes let a search read less.
        grow_to
            The number of items that the index is to hold in that DRAM later, if larger than now.
        seed
            Fixes sampling and training; equal input and seed give an equal index.

        Raises
        ------
        FileExistsError
            When `path` holds anything already.
        FileNotFoundError
            When the folder of `path` does not exist.
        BudgetError
            When `dram` is too small; the message names a budget that is enough.
        ValueError, TypeError
            When items, ids, attributes or documents cannot be indexed. Nothing is left behind.
        """
        options = ItemBuild(
            parse_bytes(dram, "dram"), check_int("grow_to", grow_to, 0), check_int("seed", seed, 0, 2**31 - 2)
        )
        source = GivenItems(items, lengths)
        names = None if ids is None else as_ids(ids, None)
        if names is not None:
            refuse_clashes(names)
        check_here(path, "build it in a folder, and push it")
        place = Path(path).absolute()
        existed = place.exists()
        try:
            with Store.create(place, kind=KIND) as store:
                build_items(store, source, names, attributes, documents, options)
        except BaseException:
            if not existed:
                shutil.rmtree(place, ignore_errors=True)
            raise
        return cls.open(place, writable=True)

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
        audit: float = 0.0,
    ) -> Self:
        """Open the index at `path`.

        Parameters
        ----------
        path
            A directory made by :meth:`build`, or the URL of a backup to search in place.
        writable
            Whether it may be changed, by one process at a time. Any number of processes may search it meanwhile, each
            in the state that was committed when it opened the index, or at its last :meth:`refresh`.
        verify, cache, cache_bytes
            As in :meth:`memhier.Store.open`.
        audit
            The share of queries that a thread of low priority searches again at recall 1, as :meth:`ZoomIndex.open
            <memhier.ann.ZoomIndex.open>` has it: ``stats()["audit"]`` has the recall found. Where that is less than
            declared, or after 1,000 queries clearly more, the thread tunes the index for the audited queries, as
            :meth:`tune` does, once it has kept 128 of one class. It keeps up to 1,000 in half of the DRAM that the
            index leaves of its ``dram=``.

        Raises
        ------
        BudgetError
            When `audit` has no room in the index's DRAM.
        FileNotFoundError, FormatError, CorruptionError
            When there is no index at `path`, or it is damaged.
        LockedError
            When `writable` is true and another process has it open for writing.
        """
        share = check_number("audit", audit, 0, 1)
        store = Store.open(path, kind=KIND, writable=writable, verify=verify, cache=cache, cache_bytes=cache_bytes)
        try:
            return cls(store, share)
        except BaseException:
            store.close()
            raise

    def _start_audit(self, share: float) -> Auditor:
        state, about, writer = self._searcher.state, self._about, self._writer
        short, long = (each * self.dimension for each in _AUDITED_VECTORS)
        tuning = self._footprint.search_bytes(state, state.longest)
        room = audit_bytes(short, long, about.dram - self._footprint.planned(state) - tuning)
        index = AuditedItems(self._searcher, self._reader, writer, self._lock)
        counts = AuditRecord.load(self._store.get(AUDIT_KEY), index.efforts(state), index.plain, self._store.path)
        self._footprint.audit_bytes = room + tuning
        if writer is not None:
            writer.record = counts.encode
        audit = Auditor(share, about.seed, index, room=room, counts=counts)
        when_gone(self, audit.stop)
        return audit

    def search(
        self,
        queries: object,
        k: int,
        *,
        recall: float | None = None,
        where: str | Sequence[str | None] | None = None,
        max_reads: int | None = None,
        deadline_ms: float | None = None,
        allow: object = None,
        deny: object = None,
        fields: bool | Sequence[str] | None = None,
    ) -> ItemResult:
        """Return the `k` items with the largest MaxSim for each query.

        The result unpacks in the order of faiss: ``scores, ids = index.search(queries, k)``.

        Parameters
        ----------
        queries
            A matrix ``[vectors, d]`` for one query, or a list of such matrices, or an array ``[q, vectors, d]``; up to
            4,096 vectors each, of any real dtype, compared as float32.
        k
            Number of items. Where the index or a filter leaves fewer, ids of -1 with scores of minus infinity follow.
        recall
            The mean share of the best items to find, above 0 and at most 1; 0.99 by default. The build calibrates the
            effort on parts of items that it holds out; a query unlike these is compared with all items, see
            :meth:`tune`. Above 0.995, and where nothing is calibrated, a search reads every item whose score may be
            large enough by a bound that holds for certain, and so finds the best items exactly.
        where
            A filter on attributes, such as ``"year >= 2020"``: only items that fulfil it are searched. Or a list with a
            filter, or None, for each query of a call; equal ones are evaluated once.
        max_reads
            The most pages of items read for one query, where a page that several items share counts for each. The items
            of the largest bounds come first; where the next one does not fit, the search ends.
        deadline_ms
            Milliseconds after which no further round of reads starts; the search returns the best ranked until then,
            and none on SSD for queries whose turn comes later.
        allow, deny
            Ids: search only these items, or all but these. Any collection, which may hold ids that no item has; or a
            list with a collection, or None, for each query of a call.
        fields
            Attributes and documents to return with the items: True for all, or a list of names. They are read once the
            items are found, beyond `max_reads` and `deadline_ms`.

        Warns
        -----
        RecallWarning
            When limits keep a search from the recall asked for; once. ``stats["recall"]`` is the recall that it keeps.

        Raises
        ------
        ValueError, TypeError
            When a query is empty, of another dimension or not finite, or a number is out of range.
        CorruptionError
            When a page read from SSD differs from the page written.

        Notes
        -----
        A query costs one product of its vectors with all centroids, work linear in the vectors of the candidates, and
        the reads of the items that it ranks.
        """
        one = where if where is None or isinstance(where, str) else None
        options = SearchOptions(
            k, recall, one, max_reads=max_reads, deadline_ms=deadline_ms, fields=fields, allow=allow, deny=deny
        )
        self._check_open()
        wanted, single = as_queries(queries, self.dimension)
        found = self._searcher.search(wanted, options, query_groups(where, allow, deny, len(wanted), single=single))
        if not single:
            return found
        fields_of_one = {name: column[0] for name, column in found.fields.items()}
        return ItemResult(found.ids[0], found.scores[0], found.stats, fields_of_one)

    def explain(self, query: object, k: int = 10, **options: Any) -> ItemExplanation:
        """Search for one query and tell its steps: lists looked at, items scored by codes, pages read, why it stopped.

        The search is that of :meth:`search`. The account takes 20 bytes for each item of the index beside it, and half
        a KiB for each of its records.

        Parameters
        ----------
        query
            ``[vectors, d]``.
        k
            Number of items.
        **options
            As in :meth:`search`.

        Examples
        --------
        >>> import numpy as np, tempfile
        >>> from memhier.ann import MultiVectorIndex
        >>> items = np.eye(8, dtype="float32").reshape(4, 2, 8)
        >>> with MultiVectorIndex.build(tempfile.mkdtemp() + "/index", items, dram="4MiB") as index:
        ...     print(index.explain(items[2], k=1))
        1 of 1 lists were looked at, with 4 of 4 items;
        4 were scored by their codes.
        4 were ranked exactly, by bounds that hold for certain, in 1 round: 1 pages read.
        It stopped as every candidate had been read.
        """
        if unknown := options.keys() - SEARCH_OPTIONS:
            raise TypeError(f"{min(unknown)}=: expected options of MultiVectorIndex.search")
        asked = SearchOptions(k, **options)
        self._check_open()
        wanted, single = as_queries(query, self.dimension)
        if not single:
            raise ValueError(f"query holds {len(wanted)} queries: expected one, a matrix [vectors, {self.dimension}]")
        return self._searcher.explain(wanted[0], asked)

    def reconstruct(self, ids: object) -> list[Any]:
        """Return the vectors of items, which may repeat, as they are stored: a matrix ``[vectors, d]`` for each id.

        Raises
        ------
        KeyError
            For an id that is not in the index.
        """
        self._check_open()
        state = self._searcher.state
        wanted, inverse = with_repeats(ids, state.id_kind)
        found = tokens_of(state, wanted, self._reader)
        return [found[place] for place in inverse.tolist()]

    def blocks(self) -> Iterator[tuple[npt.NDArray[Any], list[npt.NDArray[Any]]]]:
        """Return ids and items of the whole index, as it is now, in blocks of some MiB in the order on SSD.

        Yields
        ------
        ids, items
            int64, or strings as objects, ``[n]``; a matrix ``[vectors, d]`` for each, as stored.
        """
        self._check_open()
        return item_blocks(self._searcher.state, self._reader)

    def ids(self, where: str | None = None) -> Iterator[npt.NDArray[Any]]:
        """Return all ids of the index, as it is now, some thousand at a time, in the order on SSD.

        Parameters
        ----------
        where
            A filter as in :meth:`search`: only the ids of items that fulfil it.

        Yields
        ------
        numpy.ndarray
            int64, or strings as objects, ``[n]``.
        """
        self._check_open()
        if where is None:
            return stream_ids(self._searcher.state.parts, self._searcher.state.fresh)
        with self._searcher.turns.next():
            state = self._searcher.state
            allowed = Allowed.of(state, where)
            return stream_ids(state.parts, state.fresh, allowed.words(state), allowed.waiting)

    def fetch(self, ids: object, fields: bool | Sequence[str] = True) -> dict[str, npt.NDArray[Any]]:
        """Return attributes and documents of ids, as :meth:`ZoomIndex.fetch <memhier.ann.ZoomIndex.fetch>` does."""
        self._check_open()
        check_fields(fields)
        with self._searcher.turns.next():
            return fields_of_ids(self._searcher.state, self._reader, ids, fields)

    def contains(self, ids: object) -> npt.NDArray[np.bool_]:
        """Return whether an item has each of these ids, which may repeat, bool ``[n]``.

        Raises
        ------
        ValueError, TypeError
            For ids that no item can have, or of another type than those of the index.
        """
        self._check_open()
        state = self._searcher.state
        wanted, inverse = with_repeats(ids, state.id_kind)
        return locate(state.parts, state.fresh, wanted).known[inverse]

    @shielded
    def refresh(self) -> bool:
        """Take over the newest commit of another process; return whether there was one.

        For an index that is open for reading. Searches go on meanwhile, each in the state that it began with. The
        arrays of the new commit take their DRAM beside those of the one before until the last search of that has ended.

        Raises
        ------
        FormatError
            When another index lies there now, of another shape or budget.
        FileNotFoundError, CorruptionError
            As :meth:`open`.
        """
        with self._lock:
            self._check_open()
            following = self._store.newer()
            if following is None:
                return False
            try:
                about = ItemDescription.load(following)
                if about.shape != self._about.shape:
                    raise FormatError(f"{self.path}: another index lies there now; open it with MultiVectorIndex.open")
                footprint, _, self._searcher.state = _opened(following, self._reader, about)
                footprint.audit_bytes = self._footprint.audit_bytes
                self._footprint = footprint
            except BaseException:
                following.close()
                raise
            before, self._store, self._about = self._store, following, about
            before.leave()
            return True

    @shielded
    def add(
        self, items: Any, ids: object = None, attributes: Any = None, documents: Any = None, *, lengths: object = None
    ) -> npt.NDArray[Any]:
        """Add items. Searches find them at once; :meth:`commit` makes them durable.

        Parameters
        ----------
        items, lengths
            As in :meth:`build`, of the dimension of the index and values that its dtype holds.
        ids
            Integers or strings ``[n]``, of the index's type, that are not in it; the next free integers when not given.
        attributes
            As in :meth:`build`. A new attribute is null for all items before.
        documents
            As in :meth:`build`, without iterators. Documents of new names are None for all items before.

        Returns
        -------
        numpy.ndarray
            int64, or strings as objects, ``[n]``: the ids.

        Raises
        ------
        BudgetError
            When the DRAM given at build is too small for them; nothing was added.
        ValueError, TypeError
            When items, ids, attributes or documents do not fit; nothing was added.
        """
        writer = self._check_writable()
        given = self._given(items, lengths)
        names = None if ids is None else as_ids(ids, self._about.id_kind)
        with writer.lock:
            self._searcher.state, found = writer.add(self._searcher.state, given, names, attributes, documents)
        return found.values()

    @shielded
    def remove(self, ids: object = None, *, where: str | None = None) -> int:
        """Remove items by id or by a filter, and return how many. Searches no longer find them.

        :meth:`commit` makes it durable.

        Parameters
        ----------
        ids
            Integers or strings ``[n]``, of the index's type, each once.
        where
            Instead of ids: a filter as in :meth:`search`.

        Raises
        ------
        KeyError
            For an id that is not in the index; nothing was removed.
        ValueError, TypeError
            When there are neither ids nor a filter, or both, or the filter is none of this index.
        """
        writer = self._check_writable()
        check_either(ids, where)
        with writer.lock:
            if where is not None:
                with self._searcher.turns.next():
                    self._searcher.state, count = writer.remove_where(self._searcher.state, where)
                return count
            names = as_ids(ids, self._about.id_kind)
            self._searcher.state = writer.remove(self._searcher.state, names)
        return len(names)

    @shielded
    def update(
        self, ids: object, items: Any = None, attributes: Any = None, documents: Any = None, *, lengths: object = None
    ) -> None:
        """Replace items, attributes or documents, or some of these, in one step.

        Parameters
        ----------
        ids
            Ids of items in the index, each once.
        items, lengths
            As in :meth:`add`, one for each id. Without them the vectors stay; they are written anew beside their
            fields.
        attributes
            As in :meth:`build`. Other attributes keep their values: a column that the table lacks or, with a dict for
            each item, a name that its dict lacks. A value of None is null.
        documents
            As in :meth:`add`. Other documents stay, as attributes do.

        Raises
        ------
        KeyError, ValueError, TypeError, BudgetError
            As :meth:`remove` and :meth:`add`; nothing was changed.
        """
        writer = self._check_writable()
        names = as_ids(ids, self._about.id_kind)
        check_given(items, attributes, documents)
        given = None if items is None else self._given(items, lengths)
        with writer.lock:
            self._searcher.state, _ = writer.update(self._searcher.state, names, given, attributes, documents)

    @shielded
    def upsert(
        self, ids: object, items: Any, attributes: Any = None, documents: Any = None, *, lengths: object = None
    ) -> int:
        """Replace the items that the index has, and add the others, in one step; return how many were added.

        Parameters
        ----------
        ids
            Integers or strings ``[n]``, of the index's type, each once.
        items, lengths
            As in :meth:`add`, one for each id.
        attributes, documents
            As in :meth:`update`. An added item has null, or None, for those that are not given.

        Raises
        ------
        ValueError, TypeError, BudgetError
            As :meth:`add`; nothing was changed.

        Examples
        --------
        >>> import numpy as np, tempfile
        >>> from memhier.ann import MultiVectorIndex
        >>> items, path = [np.eye(4)[:2], np.eye(4)[1:]], tempfile.mkdtemp() + "/index"
        >>> with MultiVectorIndex.build(path, items, ["ash", "elm"], dram="4MiB", grow_to=9) as index:
        ...     index.upsert(["elm", "oak"], [np.eye(4)[:1], np.eye(4)[3:]], documents={"text": ["Elm", "Oak"]})
        ...     index.search(np.eye(4)[3:], k=1, fields=True).rows()
        1
        [{'id': 'oak', 'score': 1.0, 'text': 'Oak'}]
        """
        writer = self._check_writable()
        names = as_ids(ids, self._about.id_kind)
        given = self._given(items, lengths)
        with writer.lock:
            self._searcher.state, added = writer.update(
                self._searcher.state, names, given, attributes, documents, insert=True
            )
        return added

    @shielded
    def commit(self, compact: bool | None = None) -> None:
        """Make all additions and removals durable, all of them or none.

        Parameters
        ----------
        compact
            Whether to :meth:`compact` as well. With None, a thread makes lists, codes and calibration anew beside the
            calls that follow, once additions and removals since these were made exceed three tenths of the items of
            that time.

        Warns
        -----
        UserWarning
            When the thread failed since the last commit, with its error. This commit succeeds all the same.

        Notes
        -----
        A commit writes the items added since the last one. It joins the last parts that are small beside those after
        them, so an item is written again some log(n) times. The join holds both copies of their codes for a while.

        A later commit takes over the index made anew. A commit that follows close on another waits for the thread twice
        as long as the thread waited for it. ``stats()["renewal"]`` and the end of the thread are as
        :meth:`ZoomIndex.commit <memhier.ann.ZoomIndex.commit>` has them. The thread takes the DRAM of a build of the
        items on top of the budget.
        """
        writer = self._check_writable()
        with writer.lock:
            self._searcher.state = writer.commit(self._searcher.state, compact)
        warn_of(writer.failures())

    def compact(self) -> None:
        """Commit, and make lists, codes and calibration anew from all items; it takes the time and DRAM of a build."""
        self.commit(compact=True)

    @shielded
    def tune(self, queries: object) -> None:
        """Calibrate recall for queries like these.

        Queries of one or two vectors, of three to seven, and of more have efforts of their own; those of a class with
        fewer than 128 queries stay. The queries are searched at recall 1, then with efforts learnt from them, and the
        least efforts that find enough are kept. A commit that makes lists and codes anew calibrates anew.

        Parameters
        ----------
        queries
            As in :meth:`search`, at least 128 of one class; up to 512 of each are looked at.

        Raises
        ------
        ValueError
            For fewer queries, or an index with few items on SSD.

        Notes
        -----
        The result is durable if the index is open for writing. It takes the place of one search; changes wait for its
        end.

        Examples
        --------
        >>> import numpy as np, tempfile
        >>> from memhier.ann import MultiVectorIndex
        >>> random = np.random.default_rng(0)
        >>> items, path = random.normal(size=(600, 8, 16)).astype("float32"), tempfile.mkdtemp() + "/index"
        >>> with MultiVectorIndex.build(path, items, dram="4MiB") as index:
        ...     index.tune(random.normal(size=(128, 4, 16)))
        ...     index.search(random.normal(size=(4, 16)), k=10).stats["calibrated"]
        True
        """
        self._check_open()
        wanted, _ = as_queries(queries, self.dimension)
        with self._lock:
            state = self._searcher.state
            with self._searcher.turns.next():
                calibration = tuned(state, self._reader, wanted)
            if self._writer is not None:
                self._writer.keep_tuning(calibration)
            self._searcher.state = replace(state, calibration=calibration)

    @shielded
    def save_to(self, path: str | PathLike[str]) -> None:
        """Copy the last committed state into the new directory `path`, or to a URL as :meth:`push` does."""
        self._check_open()
        self._store.copy(path)

    def push(self, url: str, *, keep: int | None = None, verify: bool = False) -> Transfer:
        """Back up the last committed state to a URL; see :meth:`memhier.Store.push`."""
        self._check_open()
        return self._store.push(url, keep=keep, verify=verify)

    @staticmethod
    @shielded
    def pull(url: str, path: str | PathLike[str], *, generation: int | None = None) -> Transfer:
        """Restore a backup into the directory `path`; see :meth:`memhier.Store.pull`."""
        return Store.pull(url, path, kind=KIND, generation=generation)

    def __len__(self) -> int:
        return self._searcher.state.count

    def __repr__(self) -> str:
        return f"MultiVectorIndex({str(self.path)!r}, {len(self)} items x {self.dimension} {self._about.dtype})"

    @property
    def path(self) -> Path:
        """The directory of the index, absolute."""
        return self._store.path

    @property
    def dimension(self) -> int:
        """Dimension of a vector."""
        return self._about.dimension

    @property
    def fields(self) -> dict[str, str]:
        """Types of the attributes by name, as :attr:`ZoomIndex.fields` has them, and ``"document"`` of documents."""
        return {**self._searcher.state.schema, **dict.fromkeys(self._searcher.state.documents, "document")}

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes: codes, ids, lists, checksums, read and work buffers."""
        return self._footprint.held(self._searcher.state)

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: sizes, and the reader's work since open.

        ``memory_bytes`` is the DRAM held now; ``planned_bytes`` is the most that it becomes while ``searches`` run at a
        time and items are removed. ``vector_bytes`` are the bytes of all vectors that a search can find. ``audit`` is
        None without an audit, otherwise as :meth:`ZoomIndex.stats <memhier.ann.ZoomIndex.stats>` has it, and so is
        ``renewal``.
        """
        state, about = self._searcher.state, self._about
        alive = [part.tokens_alive for part in state.parts]
        vectors = sum(alive) + int(state.waiting.starts[-1])
        return {
            "items": len(self),
            "vectors": vectors,
            "dimension": self.dimension,
            "dtype": about.dtype,
            "lists": state.book.lists,
            "parts": len(state.parts),
            "code_bytes": state.book.book.code_bytes,
            "memory_bytes": self.memory_bytes,
            "planned_bytes": self._footprint.planned(state),
            "dram": about.dram,
            "searches": about.searches,
            "vector_bytes": vectors * self.dimension * about.token_dtype.itemsize,
            "file_bytes": sum(segment.length for segment in self._store.segments().values()),
            "calibrated": state.calibration.known,
            "audit": None if self._audit is None else self._audit.stats(),
            "renewal": "none" if self._writer is None else self._writer.renewal(state),
            **self._reader.stats(),
        }

    @shielded
    def check(self) -> list[str]:
        """Read the whole index and return every inconsistency found, empty when there is none.

        It takes DRAM beyond `dram` for the items of a block of lists, at most 1,048,576.
        """
        self._check_open()
        found = [str(problem) for problem in self._store.check() if not problem.harmless]
        return found or misposted(self._searcher.state.parts)

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

    def _given(self, items: Any, lengths: object) -> GivenItems:
        return GivenItems(items, lengths, like=(self.dimension, self._about.token_dtype))

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this MultiVectorIndex is closed: open it again with MultiVectorIndex.open")

    def _check_writable(self) -> ItemWriter:
        self._check_open()
        if self._writer is None:
            raise self._store.not_writable("the index is open for searching; pass writable=True to open()")
        return self._writer


def _opened(store: Store, reader: Reader, about: ItemDescription) -> tuple[ItemFootprint, PartOpener, ItemSnapshot]:
    """Return the count of the DRAM of an index, the opener of its parts, and its committed state."""
    cache, dtype = BitmapCache(attribute_bytes(about.dram)), about.token_dtype
    texts = about.id_kind == "str"
    opener = PartOpener(store, reader, cache, about.dimension, dtype, _WORK_BYTES, texts=texts)
    book = TokenBook.load(store, about.lists, about.dimension, about.scale)
    shape = about.lists, book.book.code_bytes, about.calibration.foreign
    parts = tuple(opener.load(entry, about.schema, *shape) for entry in about.parts)
    waiting, documents = WaitingItems.none(about.dimension, dtype, about.id_kind), tuple(about.documents)
    state = ItemSnapshot(book, parts, waiting, about.schema, about.calibration, read_bytes(about.dram), documents)
    return ItemFootprint(store, reader, cache, about), opener, state
