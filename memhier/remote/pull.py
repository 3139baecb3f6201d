"""Pull: a generation at a place becomes a store on this machine, or brings an older copy up to date."""

import errno
import os
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memhier.errors import CorruptionError, FormatError
from memhier.files import File, Files, RealFiles
from memhier.io.kernels import crc32c_pages
from memhier.remote.far_side import manifest_of, object_of
from memhier.remote.manifest import Manifest, PushedSegment, checksums_of, decode_values
from memhier.remote.parallel import each_in_parallel
from memhier.remote.place import Place
from memhier.store.catalog import Catalog
from memhier.store.contents import PAGE_BYTES, Contents, SegmentInfo, segment_file_name
from memhier.store.segment_files import remove_unnamed
from memhier.store.store_directory import already_exists, refuse_foreign, take_lock
from memhier.store.transfer import Transfer

__all__ = ["contents_at", "pull_contents"]


def contents_at(place: Place, manifest: Manifest, root: Path) -> tuple[Contents, int]:
    """Return the contents of a generation, for files below `root`, and how many bytes were read for them.

    Raises
    ------
    CorruptionError
        When values or checksums are missing or damaged.
    """
    values = object_of(place, manifest.values, manifest.values_bytes)
    segments: dict[str, SegmentInfo] = {}
    moved = len(values)

    def describe(item: tuple[str, PushedSegment]) -> None:
        name, each = item
        raw = object_of(place, each.checksums, each.length // PAGE_BYTES * 4)
        checksums = np.frombuffer(raw, "<u4").astype(np.uint32)
        checksums.flags.writeable = False
        path = root / "segments" / segment_file_name(name, each.generation)
        segments[name] = SegmentInfo(name, path, each.generation, each.length, each.payload, checksums)

    each_in_parallel(describe, manifest.segments.items())
    moved += sum(info.memory_bytes for info in segments.values())
    found = decode_values(values, place.address(manifest.values))
    ordered = {name: segments[name] for name in manifest.segments}
    return Contents(manifest.kind, manifest.generation, found, ordered), moved


def pull_contents(url: str, path: str | os.PathLike[str], kind: str | None, generation: int | None) -> Transfer:
    """Make the store at `path` that of a generation at a URL.

    The store changes in one commit, the last step. A pull that was cut short goes on where it ended.

    Parameters
    ----------
    path
        A directory to make, one that a pull left unfinished, or an older copy of a generation that is still there. Such
        a copy keeps the segments that it has.
    kind
        The kind that it must have; None takes any.
    generation
        Which one; None takes the newest.

    Raises
    ------
    FileNotFoundError
        When there is no such generation, or no folder to make the store in.
    FileExistsError
        When there is something else at `path`, or a store with commits of its own.
    LockedError
        When another process has the store open for writing.
    FormatError
        When the generation is of another kind.
    CorruptionError
        When an object is missing or damaged.
    OSError
        When the place cannot be read, or the store not written.
    """
    place, root, files = Place(url), Path(path).absolute(), RealFiles()
    manifest = manifest_of(place, generation)
    if kind is not None and manifest.kind != kind:
        raise FormatError(f"{place.url}: holds a store of kind {manifest.kind!r}, expected {kind!r}")
    lock = _locked_directory(files, root)
    try:
        catalog = Catalog(files, str(root))
        before = _contents_before(catalog, root, place, manifest)
        target, moved = contents_at(place, manifest, root)
        download = _Download(files, place, before, moved)
        download.run(target, manifest)
        files.sync_directory(str(root / "segments"))
        if before is None:
            catalog.create(Contents(target.kind).header())
            before = Contents(target.kind)
        changes: dict[bytes, bytes | None] = dict.fromkeys(before.entries(), None)
        catalog.commit(changes | target.entries())
        catalog.publish()
        remove_unnamed(files, str(root / "segments"), {info.path.name for info in target.segments.values()})
    finally:
        lock.close()
    sizes = manifest.sizes()
    return Transfer(target.generation, len(sizes), sum(sizes.values()), download.objects, download.nbytes)


def _locked_directory(files: Files, root: Path) -> File:
    if files.exists(str(root)):
        refuse_foreign(files, root)
    else:
        if not files.exists(str(root.parent)):
            raise FileNotFoundError(errno.ENOENT, "the folder to pull into does not exist", str(root.parent))
        files.make_directory(str(root))
        files.sync_directory(str(root.parent))
    lock = take_lock(files, root)
    try:
        for directory in ("catalog", "segments", "tmp"):
            files.make_directory(str(root / directory))
        files.sync_directory(str(root))
    except BaseException:
        lock.close()
        raise
    return lock


def _contents_before(catalog: Catalog, root: Path, place: Place, wanted: Manifest) -> Contents | None:
    """Return the contents of the store that is there, None for an unfinished one.

    Raises FileExistsError unless a push made them, so that they are not the only copy.
    """
    if catalog.is_unfinished():
        return None
    contents = Contents.decode(catalog.recover().entries, root, checked=True)
    if contents.generation == 0:
        return contents
    with suppress(FileNotFoundError):
        there = manifest_of(place, contents.generation)
        if there.kind == contents.kind == wanted.kind and there.describes(contents):
            return contents
    raise already_exists(root)


class _Download:
    """Fills segment files from objects; chunks that are there already, from a pull that was cut short, stay.

    Attributes
    ----------
    objects, nbytes
        Read so far.
    """

    def __init__(self, files: Files, place: Place, before: Contents | None, nbytes: int) -> None:
        self._files, self._place = files, place
        self._kept = {} if before is None else dict(before.segments)
        self.objects, self.nbytes = 0, nbytes
        self._lock = threading.Lock()

    def run(self, target: Contents, manifest: Manifest) -> None:
        """Fill the files of all segments, and make them durable."""
        wanted, tasks = [], []
        for name, info in target.segments.items():
            kept = self._kept.get(name)
            if kept is None or kept.generation != info.generation:
                wanted.append((info, manifest.segments[name].objects))
            elif checksums_of(kept) != checksums_of(info):  # of another store that was pushed there since
                raise already_exists(kept.path.parent.parent)
        for info, objects in wanted:
            with self._files.open(str(info.path), "a") as file:
                file.truncate(info.length)
            starts = range(0, info.length, manifest.chunk_bytes)
            for start, name in zip(starts, objects, strict=True):
                stop = min(start + manifest.chunk_bytes, info.length)
                tasks.append(partial(self._fill, info, start, stop, name))
        each_in_parallel(lambda task: task(), tasks)
        for info, _ in wanted:
            with self._files.open(str(info.path), "a") as file:
                file.fdatasync()
        self.objects += 1 + len(target.segments)

    def _fill(self, info: SegmentInfo, start: int, stop: int, name: str) -> None:
        with self._files.open(str(info.path), "a") as file:
            block = np.empty(stop - start, np.uint8)
            if file.read_into(block.data, start) == len(block) and _matches(info, start, block):
                return
            contents = object_of(self._place, name, stop - start)
            if not _matches(info, start, np.frombuffer(contents, np.uint8)):
                raise CorruptionError(
                    f"{self._place.address(name)}: does not match the checksums of segment {info.name!r}"
                )
            file.pwrite(contents, start)
        with self._lock:
            self.objects += 1
            self.nbytes += len(contents)


def _matches(info: SegmentInfo, start: int, block: NDArray[np.uint8]) -> bool:
    assert info.checksums is not None
    first = start // PAGE_BYTES
    return np.array_equal(crc32c_pages(block), info.checksums[first : first + len(block) // PAGE_BYTES])
