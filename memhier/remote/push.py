"""Push: a committed generation of a store becomes a manifest and objects at a place."""

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from memhier.errors import CorruptionError, FormatError, LockedError
from memhier.files import Files
from memhier.io.kernels import crc32c_pages
from memhier.remote.far_side import newest, object_of, prune_place, publish, remove_damaged
from memhier.remote.manifest import Manifest, PushedSegment, checksums_of, digest, encode_values, object_path
from memhier.remote.parallel import each_in_parallel
from memhier.remote.place import Place
from memhier.store.contents import PAGE_BYTES, Contents, SegmentInfo
from memhier.store.transfer import Transfer

__all__ = ["CHUNK_BYTES", "push_contents"]

CHUNK_BYTES = 8 * 2**20
_ROUNDS = 8  # a push begins again at most so often since others came in between


def push_contents(files: Files, contents: Contents, root: Path, url: str, keep: int | None, verify: bool) -> Transfer:
    """Push the contents of a store whose files the caller holds.

    Parameters
    ----------
    root
        The store's directory.
    keep
        Generations that stay there; None keeps all.
    verify
        Read the objects that are there, too, and write damaged ones again; remove damaged manifests.

    Raises
    ------
    ValueError
        When the URL names no folder, or one in the store.
    FormatError
        When the newest generation there is of another kind.
    FileExistsError
        When it is newer than this one, or has its number and other contents, or a store is there.
    LockedError
        When other pushes came in between again and again.
    CorruptionError
        When a page of the store does not match its checksum, or objects arrive damaged again and again.
    OSError
        When the place cannot be read or written.
    """
    place = Place(url)
    _refuse_stores(place, root)
    if verify:
        remove_damaged(place)
    upload = _Upload(files, place, contents, verify)
    for _ in range(_ROUNDS):
        number, before = newest(place)
        if before is not None:
            upload.refuse_other(before)
        manifest = upload.run(before)
        if upload.is_complete(manifest) and (
            before == manifest or (publish(place, number + 1, manifest) and upload.is_complete(manifest))
        ):
            break
    else:
        raise LockedError(f"{place.url}: others pushed or pruned there {_ROUNDS} times meanwhile; push again")
    if keep is not None:
        prune_place(place, keep)
    sizes = manifest.sizes()
    return Transfer(contents.generation, len(sizes), sum(sizes.values()), upload.objects, upload.nbytes)


def _refuse_stores(place: Place, root: Path) -> None:
    """Raise for a place on this machine at which a store is, or this one's directory."""
    if place.folder is None:
        return
    folder = Path(os.path.realpath(place.folder))
    if Path(os.path.realpath(root)) in (folder, *folder.parents):
        raise ValueError(f"url={place.url!r}: lies in the store itself; push to another folder")
    if (folder / "catalog").exists():
        raise FileExistsError(errno.EEXIST, "a store is there; push to a folder of the backup's own", str(folder))


class _Upload:
    """Writes the objects of a generation that are not there yet, each read back once.

    With `verify` it trusts none that it did not read back itself.

    Attributes
    ----------
    objects, nbytes
        Written so far.
    """

    def __init__(self, files: Files, place: Place, contents: Contents, verify: bool) -> None:
        self.objects = self.nbytes = 0
        self._files, self._place, self._contents, self._verify = files, place, contents, verify
        self._segments = {name: PushedSegment.of(info) for name, info in contents.segments.items()}
        self._values = encode_values(contents.values)
        self._sound: dict[str, int] = {}  # bytes of objects written or read back here, or named by a manifest
        self._lock = threading.Lock()

    def refuse_other(self, before: Manifest) -> None:
        """Raise unless this generation may follow the newest one there."""
        contents, url = self._contents, self._place.url
        if before.kind != contents.kind:
            raise FormatError(f"{url}: holds a store of kind {before.kind!r}, expected {contents.kind!r}")
        differs = before.generation == contents.generation and not before.describes(contents)
        if before.generation > contents.generation or differs:
            raise FileExistsError(
                errno.EEXIST,
                f"generation {before.generation} there is not older than generation {contents.generation} here, and "
                "not the same; push to another URL, or pull that one",
                url,
            )

    def run(self, before: Manifest | None) -> Manifest:
        """Write the objects that are missing, and return the manifest of all.

        Parameters
        ----------
        before
            The newest manifest there: its objects were read back when they were written, and a segment with its
            checksums has its objects.
        """
        contents, there = self._contents, self._place.sizes("objects")
        known = {} if before is None or self._verify else before.sizes()
        self._sound = {name: size for name, size in (known | self._sound).items() if there.get(name) == size}
        objects: dict[str, list[str]] = {}
        tasks: list[Callable[[], object]] = [partial(self._put, self._values, there)]
        for name, info in contents.segments.items():
            tasks.append(partial(self._put_checksums, info, there))
            named = self._named_before(name, before)
            objects[name] = [*named] if named is not None else [""] * -(-info.length // CHUNK_BYTES)
            for number, each in enumerate(objects[name]):
                if each not in self._sound:
                    tasks.append(partial(self._put_chunk, info, number, objects[name], there))
        each_in_parallel(lambda task: task(), tasks)
        segments = {name: replace(each, objects=tuple(objects[name])) for name, each in self._segments.items()}
        values = digest(self._values), len(self._values)
        return Manifest(contents.kind, contents.generation, CHUNK_BYTES, *values, segments)

    def is_complete(self, manifest: Manifest) -> bool:
        """Whether all objects of a generation are there, by their names and sizes."""
        there = self._place.sizes("objects")
        return all(there.get(name) == size for name, size in manifest.sizes().items())

    def _named_before(self, name: str, before: Manifest | None) -> tuple[str, ...] | None:
        """Return the objects of a segment that an earlier push has named, so that it is not read again."""
        if before is None or before.chunk_bytes != CHUNK_BYTES or name not in before.segments:
            return None
        found = before.segments[name]
        return found.objects if replace(found, objects=()) == self._segments[name] else None

    def _put_checksums(self, info: SegmentInfo, there: dict[str, int]) -> None:
        self._put(checksums_of(info), there)

    def _put_chunk(self, info: SegmentInfo, number: int, names: list[str], there: dict[str, int]) -> None:
        names[number] = self._put(_read_chunk(self._files, info, number), there)

    def _put(self, contents: bytes, there: dict[str, int]) -> str:
        """Have an object there, read back unless that was done, and return its name."""
        name = digest(contents)
        with self._lock:
            if name in self._sound:
                return name
        if there.get(name) != len(contents):
            self._write(name, contents)
        else:
            try:  # of a push that was cut short, or to be verified
                object_of(self._place, name, len(contents))
            except CorruptionError:
                self._write(name, contents)
        with self._lock:
            self._sound[name] = len(contents)
        return name

    def _write(self, name: str, contents: bytes) -> None:
        for attempt in (1, 2, 3):
            self._place.put(object_path(name), contents)
            with self._lock:
                self.objects += 1
                self.nbytes += len(contents)
            try:
                object_of(self._place, name, len(contents))
                return
            except CorruptionError:  # damaged on its way
                if attempt == 3:
                    raise


def _read_chunk(files: Files, info: SegmentInfo, number: int) -> bytes:
    """Return a chunk of a segment, each page checked."""
    assert info.checksums is not None
    start = number * CHUNK_BYTES
    block = np.empty(min(CHUNK_BYTES, info.length - start), np.uint8)
    with files.open(str(info.path), "r") as file:
        if file.read_into(block.data, start) != len(block):
            raise CorruptionError(f"{info.path}: {file.size()} bytes, but {info.length} were committed")
    first = start // PAGE_BYTES
    wrong = crc32c_pages(block) != info.checksums[first : first + len(block) // PAGE_BYTES]
    if wrong.any():
        raise CorruptionError(f"{info.path}: page {first + int(np.argmax(wrong))} does not match its checksum")
    return block.tobytes()
