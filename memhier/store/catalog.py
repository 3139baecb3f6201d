"""The catalog: everything in a store that must change at once, in one LMDB file behind a guard.

LMDB commits; the guard publishes. ``catalog.sum`` names a transaction and holds the checksum of every block of
``data.mdb`` as that transaction left it. It is replaced after each commit, by rename, so readers go from one complete
snapshot to the next. When the process dies between the two steps, readers keep seeing the snapshot before, and the
next writer publishes the one that LMDB had already made durable.

LMDB runs without its own lock file: the store's lock lets in one writer, and readers do not use LMDB at all.
"""

import errno
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from memhier.errors import CorruptionError
from memhier.files import Files, read_file
from memhier.io.kernels import crc32c
from memhier.store.catalog_guard import Guard, Published
from memhier.store.catalog_tree import CatalogTree, Meta, read_page_size

__all__ = ["Catalog", "Snapshot"]

_MAP_SPARE_BYTES = 2**20
_CHECKSUM = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")
_NUMBER_KEY = b"transaction"
_RACE_SECONDS = 10.0
_FIRST_PAGES = 3  # Of the first transaction: two roots and a leaf.


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the catalog held after one transaction."""

    transaction: int
    entries: dict[bytes, bytes]


class Catalog:
    """Reads, and for the one writer changes, the catalog of the store at `root`."""

    def __init__(self, files: Files, root: str) -> None:
        self._files = files
        self._root = root
        self._directory = os.path.join(root, "catalog")
        self._data = os.path.join(self._directory, "data.mdb")
        self._sum = os.path.join(root, "catalog.sum")
        self._published: Published | None = None  # by the writer, which is alone

    @property
    def memory_bytes(self) -> int:
        """DRAM held: a writer's checksums of the catalog itself, 5 bytes for each 4096."""
        return 0 if self._published is None else self._published.memory_bytes

    def create(self, entries: Mapping[bytes, bytes]) -> None:
        """Make and publish the first transaction. Whatever was here before is gone."""
        for path in (self._sum, self._data):
            if self._files.exists(path):
                self._files.remove(path)
                # The guard goes for good before the catalog does: alone it would speak of damage.
                self._files.sync_directory(os.path.dirname(path))
        self._files.make_directory(self._directory)
        self._files.sync_directory(self._root)
        self.commit(entries)
        self._files.sync_directory(self._directory)
        self.publish()

    def commit(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Apply `changes` (None deletes) in one durable LMDB transaction. Readers see it after `publish`."""
        map_bytes = _map_bytes(self._files, self._data, changes)
        with _lmdb_faults(self._data) as lmdb:
            while True:
                try:
                    return self._commit(lmdb, changes, map_bytes)
                except lmdb.MapFullError:
                    # Nothing of it counts, and what it wrote lies in pages that were free.
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
                number = {_NUMBER_KEY: _NUMBER.pack(transaction.id())}
                for key, value in {**changes, **number}.items():
                    if value is None:
                        transaction.delete(key)
                    else:
                        transaction.put(key, value + _seal(key, value))
        finally:
            environment.close()

    def publish(self) -> None:
        """Write the guard of LMDB's newest transaction."""
        before, self._published = self._published, None
        with self._files.open(self._data, "r") as file:
            page_size = read_page_size(file)
            tree = CatalogTree(file, page_size, None)
            published = Published.of(file, tree, _newest(tree), page_size, before)
        fresh = self._sum + ".new"
        with self._files.open(fresh, "w") as file:
            file.append(published.guard.encode())
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
                tree = CatalogTree(file, guard.page_size, None)
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

    def is_unfinished(self) -> bool:
        """Whether the catalog was never published: at most its first transaction was made.

        Of that one a power cut may leave anything, but no more pages than it has; any later one makes the file longer,
        for LMDB never overwrites the snapshot before and never shortens its file.
        """
        if self._files.exists(self._sum):
            return False
        if not self._files.exists(self._data):
            return True
        with self._files.open(self._data, "r") as file:
            first_only = file.size() <= _FIRST_PAGES * mmap.PAGESIZE
            tree = CatalogTree(file, mmap.PAGESIZE if first_only else read_page_size(file), None)
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
        entries: dict[bytes, bytes] = {}
        for key, sealed in tree.walk(meta):
            value, seal = sealed[: -_CHECKSUM.size], sealed[-_CHECKSUM.size :]
            if seal != _seal(key, value):
                raise CorruptionError(f"{self._data}: the value of {key!r} does not match its checksum")
            entries[key] = value
        # A root page could be made to look newer than it is by one bit; its tree tells.
        if entries.pop(_NUMBER_KEY, None) != _NUMBER.pack(meta.transaction):
            raise CorruptionError(f"{self._data}: the tree is not that of transaction {meta.transaction}")
        return Snapshot(meta.transaction, entries)

    def _read_guard(self) -> Guard:
        return Guard.decode(read_file(self._files, self._sum), self._sum)


def _newest(tree: CatalogTree) -> Meta:
    return max((tree.read_meta(slot) for slot in (0, 1)), key=lambda meta: meta.transaction)


def _map_bytes(files: Files, data: str, changes: Mapping[bytes, bytes | None]) -> int:
    """Return the address space that a commit should need: most processes have more than any, but some are limited.

    Every change may rewrite a page of the tree and begin a run of pages of its own.
    """
    size = 0
    if files.exists(data):
        with files.open(data, "r") as file:
            size = file.size()
    needed = sum(len(value or b"") for value in changes.values()) + 4 * mmap.PAGESIZE * len(changes)
    return -(-(size + needed + _MAP_SPARE_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE


def _seal(key: bytes, value: bytes) -> bytes:
    """Return a value's trailer. The key is covered too: a value is right only where it belongs."""
    return _CHECKSUM.pack(crc32c(value, crc32c(key)))


@contextmanager
def _lmdb_faults(path: str) -> Iterator[ModuleType]:
    """Import LMDB (only writers need it) and turn its errors into those of the operating system."""
    import lmdb

    try:
        yield lmdb
    except lmdb.Error as error:
        # LMDB's own codes are negative; the rest are those of errno.
        code = getattr(error, "code", 0)
        raise OSError(code if code > 0 else errno.EIO, str(error), path) from error
