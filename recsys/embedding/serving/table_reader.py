"""TableReader: trained tables in another process, for evaluation and serving."""

import os
import threading
from collections.abc import Sequence
from functools import partial
from operator import mul
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, from_numpy, split

from memhier.arguments import as_ints, check_int
from memhier.budget import format_bytes, parse_bytes
from memhier.errors import BudgetError, ClosedError, FormatError
from memhier.io.reader import Reader
from memhier.log.committed_rows import REPLAY_BYTES
from memhier.recsys.embedding.collection import FeatureParser
from memhier.recsys.embedding.initial import TableSpec
from memhier.recsys.embedding.jagged.embedding_collection import lengths_of, sequences_by_name
from memhier.recsys.embedding.records import EXTRA, decoded_extra
from memhier.recsys.embedding.serving.call_rows import CALL_ID_BYTES, call_rows_of, reader_bytes
from memhier.recsys.embedding.serving.row_cache import RowCache
from memhier.recsys.embedding.serving.row_source import OpenedRows, RowSource
from memhier.recsys.embedding.serving.served import Served
from memhier.recsys.embedding.serving.table_generation import TableDescription, TableGeneration
from memhier.shield import shielded, shielded_init
from memhier.store.store import Store
from memhier.table.budgets import shared_out
from memhier.table.tiered import KIND

__all__ = ["TableReader"]


class TableReader(RowSource):
    """The tables of a checkpoint, to be looked up while another process trains them.

    It opens the last checkpoint of an :class:`EmbeddingBag`, :class:`Embedding` or :class:`EmbeddingBagCollection`,
    takes no lock, and needs no argument of the trainer. Any number of processes may read one folder; in one, any number
    of threads. Rows come from a cache in DRAM, or from SSD with their checksums compared. All that it answers is of one
    checkpoint, until :meth:`refresh` goes to the newest. The trainer removes no file that a reader needs.

    Parameters
    ----------
    path
        The folder of the tables.
    dram
        Bytes for everything, such as ``"2GB"``: the index of trained rows, twice, as a refresh makes a new one; the
        checksums of their pages, likewise; working memory; the cache gets the rest. Where the tables grow, it begins
        anew with less, each time that the index has doubled.
    threads
        Threads that look up at a time, for which working memory is set aside.
    verify
        ``"read"`` compares pages with their checksums as they are read, ``"open"`` also all of them now, ``"off"``
        never.

    Attributes
    ----------
    specs
        The tables: `name`, `rows`, `dim` and `initial` of each.

    Raises
    ------
    BudgetError
        When `dram` is too small; the message says how much would be enough.
    FileNotFoundError
        When there is nothing at `path`.
    FormatError
        When it holds no checkpoint, or no tables; or those of one rank.
    CorruptionError
        When bytes on disk differ from the written ones.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from memhier.recsys import EmbeddingBag, TableReader
    >>> path = tempfile.mkdtemp()
    >>> with EmbeddingBag(1000, 4, dram="32MiB", path=path) as bag:
    ...     bag(torch.tensor([[7, 8]])).sum().backward()
    ...     generation = bag.checkpoint()
    ...     with TableReader(path, dram="16MiB") as table:  # perhaps in another process
    ...         bag(torch.tensor([[7, 8]])).sum().backward()
    ...         generation = bag.checkpoint()
    ...         same = torch.equal(table.rows([7]), bag.weights([7]))
    ...         same, table.refresh(), torch.equal(table.rows([7]), bag.weights([7]))
    (False, True, True)
    """

    @shielded_init
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        dram: int | str,
        threads: int = 1,
        verify: Literal["read", "open", "off"] = "read",
    ) -> None:
        self._dram = parse_bytes(dram)
        self._threads = check_int("threads", threads, 1, 4096)
        self._refreshing = threading.Lock()
        self._reader = Reader()
        self._caches: list[RowCache] = []
        self.call_rows: int = 0
        self._call_bytes = 0
        try:
            store = _open(path, verify)
            try:
                about = TableDescription(store)
                self.specs: tuple[TableSpec, ...] = about.specs
                self._fit_cache(store, about, anew=True)
                self._generation = TableGeneration(store, about, self._reader)
            except BaseException:
                store.close()
                raise
        except BaseException:
            self._reader.close()
            raise
        self._closed = False

    @property
    def generation(self) -> int:
        """The number of the checkpoint that is open, as :meth:`EmbeddingBag.checkpoint` returned it."""
        return self._generation.store.generation

    @property
    def extra(self) -> dict[str, Any]:
        """The `extra` of that checkpoint."""
        store = self._generation.store
        return dict(decoded_extra(store, store.get(EXTRA)).get("extra", {}))

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes; a look-up takes working memory beside it, for which the budget has room."""
        if self._closed:
            return 0
        caches = sum(cache.memory_bytes for cache in self._caches)
        return caches + self._generation.memory_bytes + self._reader.memory_bytes

    def stats(self) -> dict[str, Any]:
        """Return plain numbers.

        ``generation``; ``trained_rows`` in it; ``capacity``, the rows that the cache has room for; ``hits`` and
        ``misses`` of distinct trained rows in it; ``reads`` and ``read_bytes`` of the SSD.
        """
        self._check_open()
        generation, caches, reader = self._generation, self._caches, self._reader.stats()
        return {
            "generation": generation.store.generation,
            "trained_rows": generation.trained_rows,
            "capacity": sum(cache.capacity for cache in caches),
            "hits": sum(cache.hits for cache in caches),
            "misses": sum(cache.misses for cache in caches),
            "reads": reader["reads"],
            "read_bytes": reader["bytes"],
        }

    def opened(self) -> OpenedRows:
        """Return the rows of this checkpoint for a call."""
        self._check_open()
        return self._generation.opened(self._caches)

    def trained(self, ids: Any, table: int = 0) -> NDArray[np.bool_]:
        """Return whether each row was ever trained, bool of the shape of `ids`; the others have their first values.

        Of a table for any ids: whether each id has a row of its own.
        """
        self._check_open()
        generation, wanted = self._generation, as_ints("ids", ids)
        rows = generation.opened(self._caches).rows_of(table, wanted.reshape(-1), "ids")
        return generation.trained(table, rows).reshape(wanted.shape)

    def ids(self, table: int = 0) -> Tensor:
        """Return the ids of this checkpoint that have a row, of a table for any ids: int64 [n], in the order of rows.

        Raises
        ------
        ValueError
            For a table whose ids are its rows.
        """
        if self.specs[table].id_space is None:
            raise ValueError(f"table={table}: the ids of {self.specs[table].name!r} are its rows")
        return from_numpy(self.opened().ids(table))

    @shielded
    def refresh(self) -> bool:
        """Go to the newest checkpoint; return whether there was one.

        Look-ups of other threads go on meanwhile, and a call ends with the checkpoint that it began with. After an
        error the reader stays where it was. Rows that did not change since are still in the cache.

        Raises
        ------
        BudgetError
            When `dram` has no room for the index of the newest checkpoint beside the present one.
        FormatError
            When the tables were made anew, or others lie there now.
        FileNotFoundError, CorruptionError
            As at open.
        """
        with self._refreshing:
            self._check_open()
            before = self._generation
            following = before.store.newer()
            if following is None:
                return False
            try:
                about = TableDescription(following)
                others = FormatError(f"{following.path}: other tables lie there now; open them with TableReader")
                if about.kept != before.about.kept:
                    raise others
                self._fit_cache(following, about, anew=about.specs != before.about.specs)
                generation = TableGeneration(following, about, self._reader)
                if not generation.follows(before):
                    raise others
            except BaseException:
                following.close()
                raise
            self.specs, self._generation = about.specs, generation
            before.store.leave()
            return True

    def embedding_bag_collection(self, tables: Sequence[Any]) -> Served:
        """Return a module in place of :class:`EmbeddingBagCollection` in a model that is evaluated.

        Parameters
        ----------
        tables
            The configurations that the trainer had, or some of them: for features and pooling.

        Raises
        ------
        ValueError
            For a table that is not there, or is of another size.
        """
        parser = FeatureParser(tables)
        numbers = [self._number(spec) for spec in parser.specs]

        def look_up(features: Any) -> Any:
            read = self.opened()
            return parser.pooled(features, lambda bags: self.pooled(read, numbers[bags.table], bags))

        return Served(look_up)

    def embedding_collection(self, tables: Sequence[Any]) -> Served:
        """Return a module in place of :class:`EmbeddingCollection`; see :meth:`embedding_bag_collection`."""
        parser = FeatureParser(tables, pooled=False)
        numbers = [self._number(spec) for spec in parser.specs]

        def look_up(features: Any) -> dict[str, Any]:
            read, bags = self.opened(), parser.bags_of(features)
            lengths = lengths_of(bags)
            counts = iter([int(length.sum()) for length in lengths])
            values: list[Tensor] = []
            for bag in bags:
                found = self.found(read, numbers[bag.table], bag.indices.numpy())
                values += split(found, [next(counts) for _ in range(bag.features)])
            return sequences_by_name(features, parser.features, values, lengths)

        return Served(look_up)

    @shielded
    def close(self) -> None:
        """Free memory and files; threads that look up get a ClosedError."""
        with self._refreshing:
            if self._closed:
                return
            self._closed = True
            self._reader.close()
            self._generation.store.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the tables were closed")

    def _number(self, wanted: TableSpec) -> int:
        for number, spec in enumerate(self.specs):
            if spec.name == wanted.name:
                if (spec.rows, spec.dim) != (wanted.rows, wanted.dim):
                    raise ValueError(
                        f"tables: {wanted.name!r} has {wanted.rows} rows of {wanted.dim}, there are {spec.rows} of "
                        f"{spec.dim}"
                    )
                return number
        raise ValueError(f"tables: no {wanted.name!r}; there are {[spec.name for spec in self.specs]}")

    def _fit_cache(self, store: Store, about: TableDescription, anew: bool) -> None:
        """Make the caches as large as a generation leaves room for, `anew` or if one has to shrink."""
        held = TableGeneration.room_for(store, about)
        fixed = 2 * held + REPLAY_BYTES + reader_bytes(self._reader, self._threads)
        groups, dims = about.groups, about.dims
        of_row = max(map(_call_bytes, about.row_bytes, groups.widths, dims))
        calls, call_bytes = call_rows_of(self._dram - fixed, self._threads, of_row)
        if self.call_rows:
            calls, call_bytes = self.call_rows, self._call_bytes
        each = [RowCache.row_bytes(dim, "f4") for dim in dims]
        room, least = self._dram - fixed - call_bytes, sum(each)
        if room < least:
            enough = fixed + 2 * (self._threads * (of_row + CALL_ID_BYTES) + least)
            raise BudgetError(
                f"dram={format_bytes(self._dram)}: too little beside {format_bytes(fixed)} for the index of trained "
                f"rows, checksums and buffers; dram={max(enough, fixed + call_bytes + least)} would be enough"
            )
        shares = shared_out([partial(mul, size) for size in each], groups.weights, groups.rows, room) or []
        if anew or any(cache.memory_bytes > share for cache, share in zip(self._caches, shares, strict=True)):
            self._caches = [
                RowCache(min(share, size * rows), dim, "f4", calls)
                for share, size, rows, dim in zip(shares, each, groups.rows, dims, strict=True)
            ]
        self.call_rows, self._call_bytes = calls, call_bytes


def _call_bytes(row_bytes: int, width: int, dim: int) -> int:
    """Return the working memory of a row in a call."""
    return row_bytes + 4 * (width + 3 * dim)


def _open(path: str | os.PathLike[str], verify: Literal["read", "open", "off"]) -> Store:
    place = os.fspath(path)
    if os.path.isdir(place) and any(name.startswith("shard-") for name in os.listdir(place)):
        raise FormatError(f"path={place!r}: holds the shards of tables over ranks; expected whole tables")
    return Store.open(path, KIND, verify=verify)
