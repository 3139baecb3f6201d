"""The generations at a place: reading, publishing and removing them.

A generation is published by its manifest, the last object that a push writes. Manifests have ascending numbers, and the
one of the greatest number counts. A number is taken once: of two pushes at a time, the second finds it taken and begins
again behind the first.
"""

import errno
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from memhier.arguments import check_int
from memhier.errors import CorruptionError, FormatError
from memhier.remote.manifest import Manifest, digest, object_path
from memhier.remote.parallel import each_in_parallel
from memhier.remote.place import Place

__all__ = [
    "Backup",
    "backups",
    "check_backup",
    "manifest_of",
    "newest",
    "object_of",
    "prune_backups",
    "prune_place",
    "publish",
    "remove_damaged",
]

T = TypeVar("T")

_FOLDER = "manifests"
_TRIES = 3  # of a manifest that arrives damaged
_BATCH = 64  # objects removed between two looks for a newer push


@dataclass(frozen=True, slots=True)
class Backup:
    """A generation at a place.

    Attributes
    ----------
    number
        Of the push, from 1.
    kind, generation
        Of the store.
    objects, nbytes
        That the generation consists of; most are shared with the generations beside it.
    """

    number: int
    kind: str
    generation: int
    objects: int
    nbytes: int


def backups(url: str) -> list[Backup]:
    """Return the generations at a URL, the newest last.

    Examples
    --------
    >>> import tempfile
    >>> from memhier import Store, backups
    >>> with Store.create(tempfile.mkdtemp() + "/store", kind="example") as store, store.begin() as tx:
    ...     offset = tx.segment("numbers").append(bytes(100))
    ...     generation = tx.commit()
    ...     moved = store.push("memory://backups-example")
    >>> [(each.number, each.generation, each.nbytes) for each in backups("memory://backups-example")]
    [(1, 1, 4100)]
    """
    place = Place(url)
    found = []
    for number, manifest in _manifests(place):
        sizes = manifest.sizes()
        found.append(Backup(number, manifest.kind, manifest.generation, len(sizes), sum(sizes.values())))
    return found


def prune_backups(url: str, keep: int) -> int:
    """Remove all but the newest generations at a URL, and the objects that no other one needs.

    Do not prune while another machine pushes there: the push notices objects that went, and writes them again, but an
    object that goes after its last look is lost until the next push. Readers of a generation that goes, in place or
    by a pull, get a CorruptionError. Leftovers of killed pushes go as well.

    Parameters
    ----------
    keep
        Generations that stay, at least 1.

    Returns
    -------
    int
        Objects removed.

    Examples
    --------
    >>> import tempfile
    >>> from memhier import Store, backups, prune_backups
    >>> with Store.create(tempfile.mkdtemp() + "/store", kind="example") as store:
    ...     for value in (b"first", b"second"):
    ...         with store.begin() as tx:
    ...             tx.put("value", value)
    ...             _ = tx.commit()
    ...         _ = store.push("memory://prune-example")
    >>> len(backups("memory://prune-example")), prune_backups("memory://prune-example", keep=1) > 0
    (2, True)
    >>> len(backups("memory://prune-example"))
    1
    """
    return prune_place(Place(url), check_int("keep", keep, 1, unit="generations"))


def prune_place(place: Place, keep: int) -> int:
    """Do the work of `prune_backups`."""
    there = place.sizes("objects")
    manifests = dict(_manifests(place))
    doomed = sorted(manifests)[:-keep]
    cut_short = [f"{_FOLDER}/{name}" for name in place.sizes(_FOLDER) if name.startswith(".")]
    place.remove([*cut_short, *(_path(number) for number in doomed)])
    named = {name for number, manifest in manifests.items() if number not in doomed for name in manifest.sizes()}
    garbage = sorted(there.keys() - named)
    newest_here = max(manifests, default=0)
    for start in range(0, len(garbage), _BATCH):
        if max(_numbers(place), default=0) != newest_here:
            return start  # a push came in between, and may need the rest
        place.remove([object_path(name) for name in garbage[start : start + _BATCH]])
    return len(garbage)


def check_backup(url: str) -> list[str]:
    """Read every generation at a URL and return every inconsistency; each object is read once, eight at a time.

    A missing object comes back with the next push of a store that holds the same bytes, a damaged one with a push that
    has ``verify=True``. Those of older generations go with these (`prune_backups`).

    Raises
    ------
    FileNotFoundError
        When there is no backup.

    Examples
    --------
    >>> import tempfile
    >>> from memhier import Store, check_backup
    >>> with Store.create(tempfile.mkdtemp() + "/store", kind="example") as store:
    ...     for value in (b"first", b"second"):
    ...         with store.begin() as tx:
    ...             tx.put("value", value)
    ...             _ = tx.commit()
    ...         _ = store.push("memory://check-example")
    >>> check_backup("memory://check-example")
    []
    """
    place, wrong = Place(url), dict[str, str]()
    damaged: dict[int, str] = {}

    def sizes_of(number: int) -> dict[str, int]:
        try:
            return _read(place, number).sizes()
        except (CorruptionError, FormatError) as error:
            damaged[number] = str(error)
            return {}

    found = _each(place, sizes_of)
    if not found:
        raise _nothing_at(place, None)
    last = next((each for _, each in reversed(found) if each), {})
    sizes = {name: size for _, each in found for name, size in each.items()}

    def look(name: str) -> None:
        try:
            object_of(place, name, sizes[name])
        except CorruptionError as error:
            wrong[name] = f"{error}; a push with verify=True of a store that has these bytes writes them again"
            if name not in last:
                wrong[name] += "; prune_backups removes them, with older generations"

    each_in_parallel(look, sizes)
    return [damaged[number] for number, _ in found if number in damaged] + [wrong[name] for name in sorted(wrong)]


def object_of(place: Place, name: str, size: int) -> bytes:
    """Return a whole object, checked against its name.

    Raises
    ------
    CorruptionError
        When it is not there, or its bytes are others.
    """
    path = object_path(name)

    def check(contents: bytes) -> None:
        if len(contents) != size or digest(contents) != name:
            raise CorruptionError(f"{place.address(path)}: {len(contents)} bytes that do not match the object's name")

    try:
        return place.get(path, check)
    except FileNotFoundError:
        raise CorruptionError(
            f"{place.address(path)}: missing, but a manifest names it; was the generation pruned?"
        ) from None


def remove_damaged(place: Place) -> None:
    """Remove the manifests that are damaged."""
    for number in _numbers(place):
        try:
            with suppress(FileNotFoundError):  # pruned meanwhile
                _read(place, number)
        except CorruptionError:
            place.remove([_path(number)])


def newest(place: Place) -> tuple[int, Manifest | None]:
    """Return the number of the last push and its manifest; 0 and None where nothing was pushed."""
    found = _each(place, partial(_read, place), last=1)
    return found[-1] if found else (0, None)


def manifest_of(place: Place, generation: int | None) -> Manifest:
    """Return the last manifest of a generation, or of all.

    Raises
    ------
    FileNotFoundError
        When there is none.
    """
    if generation is None:
        _, last = newest(place)
        if last is not None:
            return last
    else:
        for number in reversed(_numbers(place)):
            with suppress(FileNotFoundError):  # pruned meanwhile
                if (manifest := _read(place, number)).generation == generation:
                    return manifest
    raise _nothing_at(place, generation)


def _nothing_at(place: Place, generation: int | None) -> FileNotFoundError:
    """Return the error for a place without this generation, or without any."""
    sought = "memhier backup" if generation is None else f"generation {generation}"
    return FileNotFoundError(errno.ENOENT, f"no {sought} here", place.url)


def publish(place: Place, number: int, manifest: Manifest) -> bool:
    """Make a generation the newest at a place; False where another push took the number.

    The manifest is read back: one that arrived damaged is removed and written again. A place may lose the answer to a
    write that it made. Then the number is taken by this very manifest.
    """
    tries = 0
    while True:
        with suppress(FileExistsError):
            place.put(_path(number), manifest.encode(), new=True)
        try:
            return _read(place, number) == manifest
        except CorruptionError:
            place.remove([_path(number)])
            tries += 1
            if tries == _TRIES:
                raise


def _manifests(place: Place) -> list[tuple[int, Manifest]]:
    return _each(place, partial(_read, place))


def _each(place: Place, read: Callable[[int], T], last: int = 0) -> list[tuple[int, T]]:
    """Read the manifests by number, or the last ones; where the newest went meanwhile, there is a newer one."""
    newest = -1
    while (numbers := _numbers(place)) and numbers[-1] != newest:
        newest, found = numbers[-1], list[tuple[int, T]]()
        for number in numbers[-last:]:
            with suppress(FileNotFoundError):
                found.append((number, read(number)))
        if found and found[-1][0] == newest:
            return found
    if numbers:
        raise FileNotFoundError(errno.ENOENT, "is listed, but not there", place.address(_path(newest)))
    return []


def _numbers(place: Place) -> list[int]:
    names = (name.removesuffix(".json") for name in place.names(_FOLDER))
    return sorted(int(name) for name in names if name.isdigit())


def _read(place: Place, number: int) -> Manifest:
    found: list[Manifest] = []
    where = place.address(_path(number))
    place.get(_path(number), lambda contents: found.append(Manifest.decode(contents, where)))
    return found[-1]


def _path(number: int) -> str:
    return f"{_FOLDER}/{number:08d}.json"
