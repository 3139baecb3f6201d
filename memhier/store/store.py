"""Store: a directory that changes all at once.

An LMDB catalog names the contents; bulk bytes lie in append-only segment files beside it. A commit writes the
segments, makes them durable, then makes one durable transaction of the catalog, then publishes it. A file that the
catalog does not name does not exist, so there is nothing to repair after a crash. FORMAT.md describes every file.
"""

import errno
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import check_here, check_int, is_url
from memhier.closing import Closing
from memhier.errors import ClosedError, CorruptionError, FormatError, LockedError
from memhier.files import File, Files, RealFiles
from memhier.shield import close_made, shielded, shielded_giving, when_gone
from memhier.store.catalog import Catalog, Snapshot
from memhier.store.check import Finding, check_segments, check_store
from memhier.store.contents import PAGE_BYTES, Contents, SegmentInfo, check_kind
from memhier.store.copy import copy_contents
from memhier.store.segment_files import check, hold, open_segment, read_checked, remove_unnamed
from memhier.store.segments import BUFFER_BYTES, SegmentWriter
from memhier.store.staging import Staging
from memhier.store.store_directory import already_exists, clear_directory, refuse_foreign, require_published, take_lock
from memhier.store.transaction import Transaction
from memhier.store.transfer import Transfer

if TYPE_CHECKING:
    from memhier.io.page_source import PageSource
    from memhier.io.reader import Reader

__all__ = [
    "CACHE_BYTES",
    "Finding",
    "SegmentInfo",
    "SegmentWriter",
    "Staging",
    "Store",
    "Transaction",
    "Transfer",
    "Verify",
]

Verify = Literal["read", "open", "off"]

CACHE_BYTES = "16GiB"
"""The most that the pages of a backup take on SSD, unless a caller says so."""

_RACE_SECONDS = 10.0
_NAMED = 3  # damages of a catalog, at most


class Store(Closing):
    """Named segments and small values on SSD, changed by transactions.

    :meth:`create` makes a store, :meth:`open` opens one; both can be used in a ``with`` statement.

    A store that is open for reading stays at the generation that it found, beside any writer, and keeps the files of
    that generation. It holds no LMDB handle, only values and checksums, so it works in forked children. Many threads
    may read; one process, and in it one thread, may have it open for writing.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier import Store
    >>> place = tempfile.mkdtemp() + "/numbers"
    >>> with Store.create(place, kind="example") as store, store.begin() as tx:
    ...     offset = tx.segment("squares").append(np.arange(5) ** 2)
    ...     tx.put("about", b"squares of the first numbers")
    ...     generation = tx.commit()
    >>> with Store.open(place, kind="example") as store:
    ...     store.generation, store.get("about"), store.read_segment("squares").view(np.int64).tolist()
    (1, b'squares of the first numbers', [0, 1, 4, 9, 16])
    """

    def __init__(
        self, path: Path, files: Files, verify: Verify, catalog: Catalog | None, contents: Contents, lock: File | None,
        held: Sequence[File | Closing] = (), *, sources: "Mapping[str, PageSource] | None" = None,
        url: str | None = None, stamp: tuple[int, ...] = (), again: "Callable[[], Store] | None" = None,
    ) -> None:  # fmt: skip
        self._path = path
        self._files = files
        self._verify = verify
        self._catalog = catalog
        self._contents = contents
        self._lock = lock
        self._held = held  # a reader's: the files of its segments, or the cache of a backup
        self._url = url  # of a backup
        self._stamp, self._again = stamp, again  # a reader's: of its catalog, and a call that opens the newest commit
        self._sources = sources or {}  # of a backup, which has no catalog here: of the segments' pages, by file
        self._writer_pid = os.getpid() if lock is not None else None
        self._transaction: Transaction | None = None
        self._failure: BaseException | None = None
        self._closed = False

    @classmethod
    @shielded_giving(close_made)
    def create(cls, path: str | os.PathLike[str], kind: str, *, files: Files | None = None) -> Self:
        """Make a store, open for writing. Others cannot open it before its first commit.

        Parameters
        ----------
        path
            The directory to make; its parent must exist. An empty directory, or a store of this library in which
            nothing was ever committed, is taken over.
        kind
            Purpose of the store, in a word; `open` asks for it.
        files
            File layer; the operating system's by default.

        Raises
        ------
        FileNotFoundError
            When the parent of `path` does not exist.
        FileExistsError
            When `path` holds anything else.
        LockedError
            When another process is just making a store there.
        ValueError
            When `path` is a URL.
        """
        check_here(path, "make it in a folder, and push it")
        root, files = Path(path).absolute(), files or RealFiles()
        check_kind(kind)
        if files.exists(str(root)):
            refuse_foreign(files, root)
        else:
            if not files.exists(str(root.parent)):
                advice = "the folder to make it in does not exist; make that first, or look at the path again"
                raise FileNotFoundError(errno.ENOENT, advice, str(root.parent))
            files.make_directory(str(root))
            files.sync_directory(str(root.parent))
        lock = take_lock(files, root)
        try:
            catalog, contents = Catalog(files, str(root)), Contents(kind)
            if not _is_unfinished(files, root, catalog):
                raise already_exists(root)
            # Segments first: with the catalog gone, they would look like the user's data.
            for directory in ("segments", "tmp"):
                files.make_directory(str(root / directory))
                clear_directory(files, root / directory)
            files.sync_directory(str(root))
            catalog.create(contents.header())
        except BaseException:
            lock.close()
            raise
        return cls(root, files, "read", catalog, contents, lock)

    @classmethod
    @shielded_giving(close_made)
    def open(
        cls, path: str | os.PathLike[str], kind: str, *, writable: bool = False, verify: Verify = "read",
        files: Files | None = None, cache: str | os.PathLike[str] | None = None, cache_bytes: int | str = CACHE_BYTES,
        salvage: bool = False,
    ) -> Self:  # fmt: skip
        """Open a store at its last commit.

        Parameters
        ----------
        path
            Its directory, or the URL of a backup to read in place. To read, no permission to write there is needed.
        kind
            The kind that it must have.
        writable
            Whether to take the writer's lock.
        verify
            Compares pages with their checksums: ``"read"`` as they are read, ``"open"`` also all of them now, ``"off"``
            never. The catalog is always checked, and so are the pages of a backup.
        files
            As in `create`.
        cache
            A directory on SSD that keeps the pages read from a backup, for all URLs, processes and later generations.
            By default ``memhier`` in ``$XDG_CACHE_HOME``, or else in ``~/.cache``.
        cache_bytes
            The most that the pages of this backup take there. Those that calls under way need may exceed it.
        salvage
            Whether to read a store whose catalog is damaged as far as that is whole, with a warning that names the
            damage; not for writing.

        Raises
        ------
        FileNotFoundError
            When there is nothing at `path`.
        FormatError
            When it is not a store, one of another kind or version, or one in which nothing was ever committed.
        CorruptionError
            When the bytes on disk differ from the committed ones.
        LockedError
            When another writer has it open.
        """
        check_kind(kind)
        if verify not in ("read", "open", "off"):
            raise ValueError(f"verify={verify!r}: expected 'read', 'open' or 'off'")
        if is_url(path):
            return cls._open_backup(path, kind, writable, verify, cache, cache_bytes)
        check_here(path, "pass a URL as a str")
        root, files = Path(path).absolute(), files or RealFiles()
        require_published(files, root)
        catalog = Catalog(files, str(root))
        if not writable:
            read = partial(_salvaged, catalog) if salvage else catalog.read
            contents, held, stamp = _load_and_hold(files, root, catalog, read, kind, verify)
            again = partial(cls.open, root, kind, verify=verify, files=files, salvage=salvage)
            return cls(root, files, verify, catalog, contents, None, held, stamp=stamp, again=again)
        lock = take_lock(files, root)
        try:
            contents = _contents(root, catalog.recover(), kind, verify)
            for info in contents.segments.values():
                with open_segment(files, info) as file:
                    check(file, info, verify == "open")
            files.make_directory(str(root / "tmp"))  # a copy may lack it, as it is empty
            clear_directory(files, root / "tmp")
            _remove_leftovers(files, root, contents)
        except BaseException:
            lock.close()
            raise
        return cls(root, files, verify, catalog, contents, lock)

    @classmethod
    def _open_backup(
        cls, url: str, kind: str, writable: bool, verify: Verify, cache: str | os.PathLike[str] | None,
        cache_bytes: int | str,
    ) -> Self:  # fmt: skip
        from memhier.remote.opened import open_far

        if writable:
            raise ValueError(f"path={url!r}: a backup is only read in place; pull it into a folder, and open that")
        if verify == "off":
            raise ValueError("verify='off': expected 'read' or 'open' for a backup, whose pages are always checked")
        files = open_far(url, kind, cache, cache_bytes)
        cached = files.cache
        kept = cached.folder, files, verify, None, cached.contents, None, [cached]
        again = partial(cls.open, url, kind, verify=verify, cache=cache, cache_bytes=cache_bytes)
        opened = cls(*kept, sources=cached.segments, url=url, again=again)
        if verify == "open" and (damaged := opened.check()):
            raise CorruptionError(str(damaged[0]))
        return opened

    @property
    def path(self) -> Path:
        """The directory; of a backup, that of its cache."""
        return self._path

    @property
    def kind(self) -> str:
        """Purpose of the store."""
        return self._contents.kind

    @property
    def generation(self) -> int:
        """The number of the commit that is open; 0 before the first."""
        return self._contents.generation

    @property
    def writable(self) -> bool:
        """Whether it was opened for writing."""
        return self._writer_pid is not None

    @property
    def memory_bytes(self) -> int:
        """DRAM held: values, checksums (4 bytes per page), and the buffers of an open transaction, in bytes."""
        held = self._contents.memory_bytes + (0 if self._catalog is None else self._catalog.memory_bytes)
        held += sum(source.marks.nbytes for source in self._sources.values())
        transaction = self._transaction  # another thread may end it
        return held + (0 if transaction is None else transaction.memory_bytes)

    def newer(self) -> "Store | None":
        """Open the newest commit for reading, as this one is open; None where this is the newest, or open for writing.

        A backup is opened in place again. Another store at the same place counts as a newer commit.

        Raises
        ------
        FileNotFoundError, FormatError, CorruptionError
            As `open`.
        """
        self._check_open()
        if self._again is None or (self._catalog is not None and self._catalog.stamp() == self._stamp):
            return None
        following = self._again()
        if self._url is not None and following.generation == self.generation:
            following.close()
            return None
        return following

    def leave(self) -> None:
        """Have a reader closed once no call uses it any more."""
        when_gone(self, partial(_close_all, self._held))

    def get(self, key: str) -> bytes | None:
        """Return a value of the catalog, None if there is none."""
        self._check_open()
        return self._contents.values.get(key)

    def keys(self) -> list[str]:
        """Return the keys of the catalog's values, sorted."""
        self._check_open()
        return sorted(self._contents.values)

    def segments(self) -> dict[str, SegmentInfo]:
        """Return the committed segments by name."""
        self._check_open()
        return dict(self._contents.segments)

    def attach(self, name: str, reader: "Reader", *, held: bool = False) -> int:
        """Let `reader` read a segment, checking pages as `verify` asks; return the reader's handle.

        With `held`, :meth:`memhier.Reader.hold_pages` may hold its pages.

        The handle stays good when a writer drops the segment, and after this store is closed.

        Raises
        ------
        KeyError
            When there is no such segment.
        """
        info = self._info(name)
        return reader.add(str(info.path), info.length, info.checksums, self._sources.get(str(info.path)), held)

    def read_segment(self, name: str) -> NDArray[np.uint8]:
        """Return a whole segment, uint8 [payload], checked; read in order and through the page cache.

        Raises
        ------
        KeyError
            When there is no such segment.
        CorruptionError
            When a page does not match its checksum, naming the first.
        """
        info = self._info(name)
        contents = np.empty(info.length, np.uint8)
        with open_segment(self._files, info) as file:
            read_checked(file, info, contents)
        return contents[: info.payload]

    @shielded
    def begin(self, buffer_bytes: int = BUFFER_BYTES) -> Transaction:
        """Begin a transaction; there can be one at a time.

        Parameters
        ----------
        buffer_bytes
            Bytes of each segment that wait to be written at most: whole pages of 4,096 bytes, up to a mebibyte.

        Raises
        ------
        ClosedError
            When the store is closed, a failed commit closed it for writing, or this is a forked child of the writer.
        OSError
            When it was opened for reading (``EROFS``).
        LockedError
            When the last transaction is not over.
        ValueError
            When `buffer_bytes` is something else.
        """
        self._check_writes(buffer_bytes)
        if self._transaction is not None:
            raise LockedError(f"{self._path}: another transaction of this store is open; commit or abort it first")
        assert self._catalog is not None
        self._transaction = Transaction(
            self._files, self._path / "segments", self._catalog, self._contents, self._end, buffer_bytes
        )
        return self._transaction

    def stage(self, buffer_bytes: int = BUFFER_BYTES) -> Staging:
        """Begin segments that a later transaction may take over (`Transaction.adopt`); others may be open meanwhile.

        Any thread may call it. The next writer removes segments that no transaction took over.

        Parameters
        ----------
        buffer_bytes
            As in `begin`.

        Raises
        ------
        ClosedError, OSError, ValueError
            As in `begin`.
        """
        self._check_writes(buffer_bytes)
        return Staging(self._files, self._path / "tmp", buffer_bytes)

    def check(self) -> list[Finding]:
        """Read everything and return every inconsistency; harmless leftovers are marked so."""
        self._check_open()
        contents = self._contents
        if self._catalog is None:
            return check_segments(self._files, contents.segments.values())
        if self._verify == "off":
            # No checksums were kept. Those of a newer generation belong to other files.
            published = Contents.decode(self._catalog.read().entries, self._path, checked=True)
            contents = published if published.generation == contents.generation else contents
        return check_store(self._files, str(self._path), contents.segments.values())

    def copy(self, path: str | os.PathLike[str], *, leave_out: Collection[str] = ()) -> None:
        """Copy the committed contents to a new store, each page checked, while others read and a writer goes on.

        The copy has the generation that is open here; the newest for a writer, or with ``verify="off"``. It can be
        opened once it is complete; after a failure a new attempt takes its place over.

        Parameters
        ----------
        path
            As in `create`; or a URL, as in `push`.
        leave_out
            Keys of values that the copy does not get.

        Raises
        ------
        FileExistsError
            When there is something at `path`.
        CorruptionError
            When a page does not match its checksum.
        """
        self._check_open()
        if is_url(path):
            self.push(path, leave_out=leave_out)
            return
        if self._writer_pid is not None or self._verify == "off":
            with self._reader() as source:
                source.copy(path, leave_out=leave_out)
            return
        with Store.create(path, self.kind, files=self._files) as target:
            copy_contents(self._files, self._contents.without(leave_out), target.path)

    def push(
        self, url: str, *, keep: int | None = None, verify: bool = False, leave_out: Collection[str] = ()
    ) -> Transfer:
        """Bring the committed contents to a folder on any file system that fsspec knows: a backup, or its next state.

        Objects that the folder has stay: only changed segments are read and moved. Each new object is read back and
        compared. The backup changes with the last object; a push that was cut short goes on where it ended. Others may
        read and write the store meanwhile. It takes up to 300 MiB of DRAM, whatever the sizes of the segments, beside
        three times their checksums (4 bytes for 4 KiB).

        Parameters
        ----------
        url
            Such as ``"s3://bucket/index"``; the store's alone.
        keep
            Generations that stay there; None keeps all. Do not remove any while another machine pushes.
        verify
            Whether to read all objects of this generation there, and all of the store, too: damaged objects are written
            again, and damaged descriptions of other generations removed. `memhier.check_backup` finds damage.
        leave_out
            Keys of values that the backup does not get.

        Returns
        -------
        Transfer
            Objects and bytes, in all and moved.

        Raises
        ------
        FormatError
            When nothing was committed yet, or the folder holds a backup of a store of another kind.
        FileExistsError
            When it holds a newer generation, or another store's of this number, or a store.
        ValueError
            When `url` names no folder, or one in the store itself.
        LockedError
            When other pushes came in between again and again.
        CorruptionError
            When a page does not match its checksum, or objects arrive damaged.
        OSError
            When reads or writes there failed six times.

        Examples
        --------
        >>> import tempfile
        >>> from pathlib import Path
        >>> from memhier import Store
        >>> place = Path(tempfile.mkdtemp())
        >>> with Store.create(place / "store", kind="example") as store, store.begin() as tx:
        ...     offset = tx.segment("numbers").append(bytes(range(250)) * 20)
        ...     generation = tx.commit()
        ...     store.push("memory://push-example").moved_bytes, store.push("memory://push-example").moved_bytes
        (8200, 0)
        >>> Store.pull("memory://push-example", place / "pulled").moved_bytes
        8200
        >>> with Store.open("memory://push-example", "example", cache=place / "cache") as backup:
        ...     backup.read_segment("numbers").sum()
        np.uint64(622500)
        """
        self._check_open()
        keep = None if keep is None else check_int("keep", keep, 1, unit="generations")
        if not isinstance(verify, bool):
            raise TypeError(f"verify={verify!r}: expected True or False")
        if self._writer_pid is not None or self._verify == "off":
            with self._reader() as source:
                return source.push(url, keep=keep, verify=verify, leave_out=leave_out)
        from memhier.remote.push import push_contents

        return push_contents(self._files, self._contents.without(leave_out), self._path, url, keep, verify)

    @staticmethod
    @shielded
    def pull(
        url: str, path: str | os.PathLike[str], *, kind: str | None = None, generation: int | None = None
    ) -> Transfer:
        """Make the store at `path` that of a backup, each object checked.

        The store changes with the last step. A pull that was cut short goes on where it ended. An older copy keeps the
        segments that it has. It takes as much DRAM as `push`.

        Parameters
        ----------
        url
            Of `push`.
        path
            A directory to make, one that a pull left unfinished, or a copy of a generation that the backup still has.
        kind
            The kind that it must have; None takes any.
        generation
            Which one; None takes the newest.

        Raises
        ------
        FileNotFoundError
            When there is no such backup or generation, or no folder to make the store in.
        FileExistsError
            When there is something else at `path`, or a store with commits that were not pushed there.
        LockedError
            When another process has the store open for writing.
        FormatError
            When the backup is of another kind.
        CorruptionError
            When an object is missing or damaged.
        OSError
            When reads there failed six times, or the store cannot be written.
        ValueError
            When `path` is a URL.
        """
        from memhier.remote.pull import pull_contents

        check_here(path, "pull into a folder")
        generation = None if generation is None else check_int("generation", generation, 1)
        return pull_contents(url, path, kind, generation)

    @shielded
    def close(self) -> None:
        """Abort an open transaction, give back the lock, and let go of the segments. A second call does nothing."""
        if self._closed:
            return
        if self._transaction is not None:
            self._transaction.abort()
        self._closed = True
        _close_all(self._held)
        if self._lock is not None:
            self._lock.close()

    def __repr__(self) -> str:
        mode = "closed" if self._closed else "reading" if self._lock is None else "writing"
        return f"Store({str(self._path)!r}, kind={self.kind!r}, generation={self.generation}, {mode})"

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self._path}: the store is closed")

    def _check_writes(self, buffer_bytes: int) -> None:
        self._check_open()
        if not PAGE_BYTES <= buffer_bytes <= BUFFER_BYTES or buffer_bytes % PAGE_BYTES:
            raise ValueError(f"buffer_bytes={buffer_bytes}: expected a multiple of {PAGE_BYTES} up to {BUFFER_BYTES}")
        if self._writer_pid is None:
            raise self.not_writable("the store is open for reading; pass writable=True")
        if self._writer_pid != os.getpid():
            raise ClosedError(f"{self._path}: the writer is process {self._writer_pid}, which forked this one")
        if self._failure is not None:
            said = f"closed for writing since a commit failed ({self._failure}); reopen it, without uncommitted changes"
            raise ClosedError(f"{self._path}: {said}")

    def not_writable(self, advice: str) -> OSError:
        """Return the error of a change of a store that is open for reading; of a backup, it says to pull that first."""
        if self._url is None:
            return OSError(errno.EROFS, advice, str(self._path))
        advice = "a backup is only read in place; pull it into a folder, change the copy, and push that"
        return OSError(errno.EROFS, advice, self._url)

    def _reader(self) -> "Store":
        """Open the last commit for reading, which keeps its files while they are copied."""
        if self.generation == 0:
            raise FormatError(f"{self._path}: an unfinished store; commit, or take a checkpoint, before you copy it")
        return Store.open(self._path, self.kind, files=self._files)

    def _info(self, name: str) -> SegmentInfo:
        self._check_open()
        if name not in self._contents.segments:
            raise KeyError(f"name={name!r}: no such segment; there are {sorted(self._contents.segments)}")
        return self._contents.segments[name]

    def _end(self, following: Contents | None, error: BaseException | None) -> None:
        """End the transaction: at the contents that it left, or, after an error, closed for writing.

        After a failed sync the contents of the disk are unknown until it is read again.
        """
        self._transaction, self._failure = None, error
        if following is not None:
            self._contents = following
            _remove_leftovers(self._files, self._path, following)


def _close_all(held: Sequence[File | Closing]) -> None:
    for file in held:
        file.close()


def _is_unfinished(files: Files, root: Path, catalog: Catalog) -> bool:
    """Whether nothing was ever committed here; said with the lock held."""
    if files.exists(str(root / "catalog.sum")):
        try:
            return Contents.decode(catalog.read().entries, root, checked=False).generation == 0
        except (CorruptionError, FormatError):
            return False
    segments = str(root / "segments")
    has_segments = files.exists(segments) and bool(files.list(segments))
    return not has_segments and catalog.is_unfinished()


def _contents(root: Path, snapshot: Snapshot, kind: str, verify: Verify) -> Contents:
    contents = Contents.decode(snapshot.entries, root, checked=verify != "off")
    if contents.generation == 0:
        raise FormatError(f"{root}: an unfinished store, nothing was ever committed to it; build it again")
    if contents.kind != kind:
        raise FormatError(f"{root}: holds a store of kind {contents.kind!r}, expected {kind!r}")
    return contents


def _load_and_hold(
    files: Files, root: Path, catalog: Catalog, read: Callable[[], Snapshot], kind: str, verify: Verify
) -> tuple[Contents, list[File], tuple[int, ...]]:
    """Load the published generation, hold its files, which a writer may be replacing, and return its stamp as well."""
    deadline = files.clock() + _RACE_SECONDS
    while True:
        stamp, snapshot = catalog.stamp(), read()
        if stamp != catalog.stamp():  # another commit came between: that of the snapshot is not known
            stamp = ()
        contents = _contents(root, snapshot, kind, verify)
        try:
            return contents, hold(files, contents.segments.values(), verify == "open"), stamp
        except FileNotFoundError as error:
            if catalog.published() == snapshot.transaction or files.clock() > deadline:
                raise CorruptionError(f"{error.filename}: missing, but the catalog names it") from None


def _salvaged(catalog: Catalog) -> Snapshot:
    """Return the published snapshot, or the entries of a damaged one that are whole."""
    try:
        return catalog.read()
    except CorruptionError as error:
        snapshot, found = catalog.salvage()
        damage = "; ".join([*dict.fromkeys(map(str, [error, *found]))][:_NAMED])
        warnings.warn(f"{damage}; the store is read as far as its catalog is whole",
                      RuntimeWarning, stacklevel=5)  # fmt: skip
        return snapshot


def _remove_leftovers(files: Files, root: Path, contents: Contents) -> None:
    named = {info.path.name for info in contents.segments.values()}
    remove_unnamed(files, str(root / "segments"), named)
