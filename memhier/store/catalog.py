"""The catalog: everything in a store that must change at once, in one LMDB file behind a guard.

LMDB commits; the guard publishes. The guard, ``catalog.sum``, names a transaction and holds the checksum of every block
of ``data.mdb`` as that transaction left it. It is replaced after each commit, by rename, so readers go from one
complete snapshot to the next. If the process dies between the two steps, readers keep seeing the snapshot before, and
the next writer publishes the one that LMDB had already made durable.

LMDB runs without its own lock file: the store's lock lets in one writer, and readers do not use LMDB at all.
"""

import errno
import mmap
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from memhier.errors import CorruptionError, FormatError
from memhier.files import Files, read_file
from memhier.io.kernels import crc32c, crc32c_each
from memhier.store.catalog_tree import BLOCK_BYTES, PAGE_SIZES, CatalogTree, Meta

__all__ = ["CHECKSUMS", "Catalog", "Guard", "Published", "Snapshot"]

_MAP_SPARE_BYTES = 2**20
_ROOM_SPARE_BYTES, _PATH_PAGES, _ENTRY_BYTES = 2**16, 4, 64  # of a commit, of a change, beside key and value
_CHECKSUM = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")
_NUMBER_KEY = b"transaction"
_GUARD_MAGIC = b"mhguard1"
_GUARD_HEAD = struct.Struct("<8sQQQ")  # magic, transaction, page size, blocks
_RACE_SECONDS = 10.0
CHECKSUMS = b"pages/"
"""Keys of entries that hold checksums of pages begin so."""
_FIRST_PAGES = 3  # of the first transaction: two roots and a leaf


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The entries of the catalog after one transaction."""

    transaction: int
    entries: dict[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Guard:
    """The contents of ``catalog.sum``: the published transaction, and a checksum for each block of the file."""

    transaction: int
    page_size: int
    checksums: NDArray[np.uint32]

    def encode(self) -> bytes:
        """Return the file's contents."""
        head = _GUARD_HEAD.pack(_GUARD_MAGIC, self.transaction, self.page_size, len(self.checksums))
        body = head + self.checksums.astype("<u4").tobytes()
        return body + _CHECKSUM.pack(crc32c(body))

    @classmethod
    def decode(cls, contents: bytes, path: str) -> "Guard":
        """Read the contents of the file at `path`."""
        body, checksum = contents[: -_CHECKSUM.size], contents[-_CHECKSUM.size :]
        if len(body) < _GUARD_HEAD.size or checksum != _CHECKSUM.pack(crc32c(body)):
            raise CorruptionError(f"{path}: does not match its own checksum")
        magic, transaction, page_size, blocks = _GUARD_HEAD.unpack_from(body)
        if magic != _GUARD_MAGIC:
            raise FormatError(f"{path}: unknown format {magic!r}, expected {_GUARD_MAGIC!r}")
        if len(body) != _GUARD_HEAD.size + 4 * blocks:
            raise CorruptionError(f"{path}: {len(body)} bytes for {blocks} blocks")
        if page_size not in PAGE_SIZES or blocks % (page_size // BLOCK_BYTES):
            raise CorruptionError(f"{path}: {blocks} blocks in pages of {page_size} bytes")
        return cls(transaction, page_size, np.frombuffer(body, "<u4", blocks, _GUARD_HEAD.size))


@dataclass(frozen=True, slots=True)
class Published:
    """A guard, and the pages that were free in its snapshot: the next transaction may write no others.

    So a commit reads the pages that it wrote and not the whole catalog; and a page that was damaged since does not get
    a checksum that fits the damage.
    """

    guard: Guard
    free: NDArray[np.bool_]

    @property
    def memory_bytes(self) -> int:
        """DRAM held."""
        return self.guard.checksums.nbytes + self.free.nbytes

    @classmethod
    def of(cls, tree: CatalogTree, meta: Meta, before: "Published | None") -> "Published":
        """Take the checksums of a snapshot that LMDB has made durable.

        Parameters
        ----------
        before
            Of the transaction before; None reads every page.
        """
        free = tree.free_pages(meta)
        pages, blocks = len(free), tree.page_size // BLOCK_BYTES
        stale = np.ones(pages, np.bool_)
        checksums = np.zeros(pages * blocks, np.uint32)
        if before is not None and before.guard.transaction + 1 == meta.transaction:
            known = min(pages, len(before.free), len(before.guard.checksums) // blocks)
            checksums[: known * blocks] = before.guard.checksums[: known * blocks]
            stale[:known] = before.free[:known]
            stale &= ~free
            stale[meta.transaction & 1] = True
        tree.checksum(np.flatnonzero(stale), checksums)
        return cls(Guard(meta.transaction, tree.page_size, checksums), free)


class Catalog:
    """Reads, and for the one writer changes, the catalog of the store at `root`."""

    def __init__(self, files: Files, root: str) -> None:
        self._files = files
        self._root = root
        self._directory = f"{root}/catalog"
        self._data = f"{root}/catalog/data.mdb"
        self._sum = f"{root}/catalog.sum"
        self._published: Published | None = None  # by the writer, which is alone

    @property
    def memory_bytes(self) -> int:
        """DRAM held: a writer's checksums of the catalog itself, 5 bytes for each 4096."""
        return 0 if self._published is None else self._published.memory_bytes

    def create(self, entries: Mapping[bytes, bytes]) -> None:
        """Make and publish the first transaction, in place of a catalog that is there."""
        for path, directory in ((self._sum, self._root), (self._data, self._directory)):
            if self._files.exists(path):
                self._files.remove(path)
                # The guard goes for good before the catalog does: alone it would look like damage.
                self._files.sync_directory(directory)
        self._files.make_directory(self._directory)
        self._files.sync_directory(self._root)
        self.commit(entries)
        self._files.sync_directory(self._directory)
        self.publish()

    def room(self, changes: Mapping[bytes, bytes | None]) -> int:
        """Return more bytes than `commit` and `publish` write: pages on the way to a change, lists of all pages."""
        blocks = 0 if self._published is None else self._published.guard.checksums.size
        rewritten = min(blocks * BLOCK_BYTES, _PATH_PAGES * mmap.PAGESIZE * len(changes))
        added = sum(len(key) + len(value or b"") + _ENTRY_BYTES for key, value in changes.items())
        return rewritten + 2 * added + 12 * blocks + _ROOM_SPARE_BYTES

    def commit(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Apply `changes` (None deletes) in one durable LMDB transaction. Readers see it after `publish`."""
        map_bytes = map_size(0 if self._published is None else self._published.guard.checksums.size, changes)
        with _lmdb_faults(self._data) as lmdb:
            while True:
                try:
                    return self._commit(lmdb, changes, map_bytes)
                except lmdb.MapFullError:
                    # The transaction was aborted, and the pages that it wrote were free.
                    map_bytes *= 2
                except lmdb.MemoryError as error:
                    raise OSError(
                        errno.ENOMEM,
                        f"no address space for the catalog's map of {map_bytes >> 20} MiB: raise this process's limit "
                        "(ulimit -v), or let it hold less",
                        self._data,
                    ) from error

    def _commit(self, lmdb: ModuleType, changes: Mapping[bytes, bytes | None], map_bytes: int) -> None:
        # Opened for each commit (0.2 ms beside several fsyncs): no LMDB handle is ever carried across a fork.
        environment = lmdb.open(
            self._directory, map_size=map_bytes, subdir=True, create=True, lock=False, readahead=False
        )
        try:
            with environment.begin(write=True) as transaction:
                values = {key: value for key, value in changes.items() if value is not None}
                values[_NUMBER_KEY] = _NUMBER.pack(transaction.id())
                for key, value in changes.items():
                    if value is None:
                        transaction.delete(key)
                for (key, kept), checksum in zip(values.items(), _checksums(values, values.values()), strict=True):
                    transaction.put(key, kept + _CHECKSUM.pack(checksum))
        finally:
            environment.close()

    def publish(self) -> None:
        """Write the guard of LMDB's newest transaction."""
        before, self._published = self._published, None
        with self._files.open(self._data, "r") as file:
            tree = CatalogTree(file)
            published = Published.of(tree, tree.newest(), before)
        contents, fresh = published.guard.encode(), self._sum + ".new"
        with self._files.open(fresh, "w") as file:
            file.append(contents)
            file.fdatasync()
        self._files.rename(fresh, self._sum)
        self._files.sync_directory(self._root)
        self._published = published

    def read(self) -> Snapshot:
        """Return the published snapshot, beside a writer if there is one."""
        deadline = self._files.clock() + _RACE_SECONDS
        while True:
            guard = self._read_guard()
            try:
                with self._files.open(self._data, "r") as file:
                    tree = CatalogTree(file, guard.page_size, guard.checksums)
                    return self._snapshot(tree, tree.read_meta(guard.transaction), guard.transaction)
            except FileNotFoundError:
                raise CorruptionError(f"{self._data}: missing, but {self._sum} describes it") from None
            except CorruptionError:
                # A writer may have published, and then reused the pages of, two newer transactions meanwhile.
                if self.published() == guard.transaction or self._files.clock() > deadline:
                    raise

    def salvage(self) -> tuple[Snapshot, list[CorruptionError]]:
        """Return the entries of a damaged catalog that are whole, for readers, and the damage.

        Checksums of pages are there even so: each says of its own page whether it fits.
        """
        found: list[CorruptionError] = []
        guard: Guard | None = None
        try:
            guard = self._read_guard()
        except CorruptionError as error:
            found.append(error)
        entries: dict[bytes, bytes] = {}
        with self._files.open(self._data, "r") as file:
            tree = CatalogTree(file, None if guard is None else guard.page_size, found=found)
            meta = tree.newest() if guard is None else tree.read_meta(guard.transaction)
            if guard is not None and meta.transaction != guard.transaction:
                raise CorruptionError(f"{self._data}: transaction {meta.transaction}, expected {guard.transaction}")
            for key, sealed in tree.walk(meta):
                value, checksum = sealed[: -_CHECKSUM.size], sealed[-_CHECKSUM.size :]
                if checksum != _CHECKSUM.pack(_checksums([key], [value])[0]):
                    found.append(CorruptionError(f"{self._data}: the value of {key!r} does not match its checksum"))
                    if not key.startswith(CHECKSUMS):
                        continue
                entries[key] = value
        entries.pop(_NUMBER_KEY, None)
        return Snapshot(meta.transaction, entries), found

    def recover(self) -> Snapshot:
        """For a writer that just took the lock: check all that LMDB relies on, finish a commit cut off by a crash."""
        snapshot = self.read()
        guard = self._read_guard()
        with self._files.open(self._data, "r") as file:
            checked = CatalogTree(file, guard.page_size, guard.checksums)
            self._published = Published(guard, checked.free_pages(checked.read_meta(guard.transaction)))
            try:
                checked.read_meta(guard.transaction + 1)
                return snapshot
            except CorruptionError:
                tree = CatalogTree(file, guard.page_size)
                other = tree.read_meta(guard.transaction + 1)
            if other.transaction == guard.transaction + 1:
                # Its pages have no checksums yet, but its structure is walked and every value has its own.
                snapshot = self._snapshot(tree, other)
                self.publish()
                return snapshot
        if other.transaction < guard.transaction:
            # LMDB failed to write this root and put the old number back; it will be overwritten before it is used.
            return snapshot
        raise CorruptionError(f"{self._data}: transaction {other.transaction} follows {guard.transaction}")

    def published(self) -> int:
        """The transaction that readers see."""
        return self._read_guard().transaction

    def stamp(self) -> tuple[int, ...]:
        """Return the stamp of the guard: another one after each commit, and of another store at this place."""
        return self._files.stamp(self._sum)

    def is_unfinished(self) -> bool:
        """Whether the catalog was never published: at most its first transaction was made.

        A power cut may leave anything of the first transaction, but no more pages than it has. Any later one makes the
        file longer, for LMDB never overwrites the snapshot before and never shortens its file.
        """
        if self._files.exists(self._sum):
            return False
        if not self._files.exists(self._data):
            return True
        with self._files.open(self._data, "r") as file:
            first_only = file.size() <= _FIRST_PAGES * mmap.PAGESIZE
            tree = CatalogTree(file, mmap.PAGESIZE if first_only else None)
            for slot in (0, 1):
                try:
                    if tree.read_meta(slot).transaction > 1:
                        return False
                except CorruptionError:
                    if not first_only:
                        raise
        return True

    def _snapshot(self, tree: CatalogTree, meta: Meta, expected: int | None = None) -> Snapshot:
        if expected is not None and meta.transaction != expected:
            raise CorruptionError(f"{self._data}: transaction {meta.transaction}, expected {expected}")
        pairs = list(tree.walk(meta))
        checksums = _checksums(
            [key for key, _ in pairs], [memoryview(sealed)[: -_CHECKSUM.size] for _, sealed in pairs]
        )
        entries: dict[bytes, bytes] = {}
        for (key, sealed), checksum in zip(pairs, checksums, strict=True):
            if sealed[-_CHECKSUM.size :] != _CHECKSUM.pack(checksum):
                raise CorruptionError(f"{self._data}: the value of {key!r} does not match its checksum")
            entries[key] = sealed[: -_CHECKSUM.size]
        # One flipped bit could make a root page look newer than it is; its tree tells.
        if entries.pop(_NUMBER_KEY, None) != _NUMBER.pack(meta.transaction):
            raise CorruptionError(f"{self._data}: the tree is not that of transaction {meta.transaction}")
        return Snapshot(meta.transaction, entries)

    def _read_guard(self) -> Guard:
        return Guard.decode(read_file(self._files, self._sum), self._sum)


def map_size(blocks: int, changes: Mapping[bytes, bytes | None]) -> int:
    """Return the address space that a commit should need: most processes have more than any, but some are limited.

    Every change may rewrite a page of the tree and begin a run of pages of its own. LMDB maps its file in any case.
    """
    needed = sum(len(value or b"") for value in changes.values()) + 4 * mmap.PAGESIZE * len(changes)
    return -(-(blocks * BLOCK_BYTES + needed + _MAP_SPARE_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE


def _checksums(keys: Iterable[bytes], values: Iterable[bytes | memoryview]) -> list[int]:
    """Return the checksum behind each value. It covers the key too: a value is right only under its own key."""
    return crc32c_each(values, crc32c_each(keys))


@contextmanager
def _lmdb_faults(path: str) -> Iterator[ModuleType]:
    """Import LMDB (only writers need it) and turn its errors into those of the operating system."""
    import lmdb

    try:
        yield lmdb
    except lmdb.Error as error:
        # LMDB's own codes are negative; the others are those of errno.
        code = getattr(error, "code", 0)
        raise OSError(code if code > 0 else errno.EIO, str(error), path) from error
