"""Ids of vectors: int64, or strings, which lie on SSD; DRAM holds 63 bits of their hash.

A look-up compares the string on SSD wherever it finds the hash. An index refuses a string whose hash is that of another
string in it (with ten million strings the odds of any such pair are 1 in 180,000).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.files import as_array
from memhier.ann.zoom.arguments import check_ids
from memhier.ann.zoom.filters.bitmaps import Words, unpack
from memhier.ann.zoom.ids.texts import Texts, as_texts, hash_texts, is_text
from memhier.ann.zoom.preview.scan_arguments import split_positions
from memhier.ann.zoom.storage.fresh import Fresh
from memhier.ann.zoom.storage.part import find_ids
from memhier.ann.zoom.storage.rows import IdKind, RowPart
from memhier.io.read_arguments import Tallies

__all__ = [
    "IdKind",
    "Ids",
    "Located",
    "Sightings",
    "as_ids",
    "ids_of",
    "locate",
    "locate_all",
    "refuse_clashes",
    "refuse_known",
    "stream_ids",
    "texts_at",
    "with_repeats",
]


Ints: TypeAlias = npt.NDArray[np.int64]

_BLOCK_IDS = 1 << 14  # a multiple of the bits of a word


@dataclass(frozen=True, slots=True)
class Ids:
    """The ids of one call, each once.

    Attributes
    ----------
    numbers
        int64 ``[n]``: themselves, or hashes.
    texts
        The strings that they are hashes of; None of integers.
    """

    numbers: Ints
    texts: Texts | None

    def __len__(self) -> int:
        return len(self.numbers)

    def shown(self, row: int) -> str:
        """Return one id as a caller writes it."""
        return str(int(self.numbers[row])) if self.texts is None else repr(self.texts[row])

    def values(self) -> npt.NDArray[Any]:
        """Return the ids as callers have them, int64 or object ``[n]``."""
        return self.numbers if self.texts is None else self.texts.objects()

    def take(self, rows: Ints) -> "Ids":
        """Return some of the ids."""
        return Ids(self.numbers[rows], None if self.texts is None else self.texts.take(rows))

    def part(self, start: int, stop: int) -> "Ids":
        """Return a run of the ids."""
        return Ids(self.numbers[start:stop], None if self.texts is None else self.texts.part(start, stop))


def as_ids(ids: Any, kind: IdKind | None, name: str = "ids") -> Ids:
    """Return ids of a type, or of either type with None.

    Raises
    ------
    TypeError
        When they are of another type.
    ValueError
        When one of them repeats.
    """
    ids = _held(ids, name)
    if not is_text(ids):
        if kind == "str" and np.size(ids):
            raise TypeError(f"{name}={_short(ids)}: this index has strings as ids, so expected strings")
        return Ids(check_ids(ids, name), Texts.none() if kind == "str" else None)
    if kind == "int64":
        raise TypeError(f"{name}={_short(ids)}: this index has integers as ids, so expected integers")
    texts = as_texts(ids, name)
    found = Ids(hash_texts(texts), texts)
    seen: set[bytes] = set()
    for word in texts.take(_shared(found.numbers)).words():
        if word in seen:
            raise ValueError(f"{name} holds {word.decode()!r} more than once: every vector needs an id of its own")
        seen.add(word)
    return found


def _held(ids: Any, name: str) -> Any:
    """Return ids on another device, or in a sequence of another library, as an array or a list."""
    if hasattr(ids, "__cuda_array_interface__") or (hasattr(ids, "__dlpack__") and not hasattr(ids, "__array__")):
        return as_array(ids, name)
    return list(ids) if isinstance(ids, Sequence) and not isinstance(ids, str | list | tuple) else ids


def refuse_clashes(ids: Ids) -> None:
    """Refuse different strings with one hash, which cannot both be in an index."""
    if ids.texts is not None and len(rows := _shared(ids.numbers)):
        raise ValueError(f"ids: {_clash(ids.texts[int(rows[0])], ids.texts[int(rows[1])])}")


def _shared(numbers: Ints) -> Ints:
    """Return the rows of repeated numbers, those of one number beside each other."""
    order = np.argsort(numbers, kind="stable")
    equal = numbers[order[1:]] == numbers[order[:-1]]
    return order[np.append(equal, False) | np.insert(equal, 0, False)] if len(order) else order


def with_repeats(ids: Any, kind: IdKind, name: str = "ids") -> tuple[Ids, Ints]:
    """Return the distinct ids, and the place of each of `ids` among them, int64 ``[n]``."""
    ids = _held(ids, name)
    if is_text(ids):
        places: dict[bytes, int] = {}
        texts = as_texts(ids, name)
        inverse = np.array([places.setdefault(word, len(places)) for word in texts.words()], np.int64)
        return as_ids([word.decode() for word in places], kind, name), inverse
    array = np.asarray(ids)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        wanted = as_ids(array, kind, name)
        return wanted, np.arange(len(wanted))
    names, inverse = np.unique(array, return_inverse=True)
    return as_ids(names, kind, name), inverse.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Located:
    """The places of ids.

    Attributes
    ----------
    positions
        int64 ``[n]``: the number of a part and its row in one, -1 if in none.
    fresh
        int64 ``[n]``: the row among fresh vectors, -1 if not there.
    """

    positions: Ints
    fresh: Ints

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """Whether each is in the index, bool ``[n]``."""
        return (self.positions >= 0) | (self.fresh >= 0)

    def take(self, rows: Ints) -> "Located":
        """Return the places of some of the ids."""
        return Located(self.positions[rows], self.fresh[rows])


def locate(parts: Sequence[RowPart], fresh: Fresh, ids: Ids) -> Located:
    """Return the places of ids; passes over all ids of the index, and reads the strings whose hashes match."""
    numbers, inverse = np.unique(ids.numbers, return_inverse=True)  # different strings may have one hash
    once = _by_number(parts, fresh, numbers)
    found = Located(once.positions[inverse], once.fresh[inverse])
    if ids.texts is not None:
        met = np.flatnonzero(found.known)
        stored = texts_at(parts, fresh, Located(found.positions[met], found.fresh[met]))
        other = met[~stored.equal(ids.texts.take(met))]
        found.positions[other] = found.fresh[other] = -1
    return found


def locate_all(parts: Sequence[RowPart], fresh: Fresh, ids: Ids) -> Located:
    """Return the places of ids; KeyError for an id that is not in the index."""
    found = locate(parts, fresh, ids)
    missing = np.flatnonzero(~found.known)
    if len(missing):
        raise KeyError(f"ids holds {ids.shown(missing[0])}, which is not in the index ({len(missing)} such ids)")
    return found


def refuse_known(parts: Sequence[RowPart], fresh: Fresh, ids: Ids) -> None:
    """Refuse ids that are in the index, and strings with the hash of another."""
    refuse_clashes(ids)
    found = _by_number(parts, fresh, ids.numbers)
    for row in np.flatnonzero(found.known)[:1].tolist():
        if ids.texts is not None:
            at = slice(row, row + 1)
            stored = texts_at(parts, fresh, Located(found.positions[at], found.fresh[at]))[0]
            if stored != ids.texts[row]:
                raise ValueError(f"ids[{row}]: {_clash(ids.texts[row], stored)}, which is in the index")
        raise ValueError(f"ids holds {ids.shown(row)}, which is in the index already: update() replaces vectors")


def _by_number(parts: Sequence[RowPart], fresh: Fresh, numbers: Ints) -> Located:
    return Located(find_ids(parts, numbers), _rows_of(numbers, fresh.ids))


def _rows_of(wanted: Ints, ids: Ints) -> Ints:
    """Return the row of each wanted id, -1 where it is not among `ids`."""
    if not len(ids):
        return np.full(len(wanted), -1, np.int64)
    order = np.argsort(ids, kind="stable")
    rows = order[np.minimum(np.searchsorted(ids, wanted, sorter=order), len(ids) - 1)]
    return np.where(ids[rows] == wanted, rows, -1)


def texts_at(parts: Sequence[RowPart], fresh: Fresh, places: Located, tally: Tallies | None = None) -> Texts:
    """Return the string of each place."""
    pieces, rows = [], []
    waiting = np.flatnonzero(places.fresh >= 0)
    if len(waiting):
        assert fresh.texts is not None
        pieces.append(fresh.texts.take(places.fresh[waiting]))
        rows.append(waiting)
    numbers, at = split_positions(places.positions)
    for which in np.unique(numbers[places.fresh < 0]).tolist():
        stored = parts[which].texts
        assert stored is not None
        here = np.flatnonzero((numbers == which) & (places.fresh < 0))
        pieces.append(stored.read(at[here], tally))
        rows.append(here)
    back = np.empty(len(numbers), np.int64)
    back[np.concatenate([np.empty(0, np.int64), *rows])] = np.arange(len(numbers))
    return Texts.joined(pieces).take(back)


def ids_of(part: RowPart, rows: Ints) -> Ids:
    """Return the ids of rows of a part."""
    texts = None if part.texts is None else part.texts.read(rows)
    return Ids(part.arrays.ids_of(rows).astype(np.int64), texts)


def stream_ids(
    parts: Sequence[RowPart],
    fresh: Fresh,
    selected: Sequence[Words] | None = None,
    waiting: npt.NDArray[np.bool_] | None = None,
) -> Iterator[npt.NDArray[Any]]:
    """Yield the ids of all parts in the order on SSD, some thousand at a time, then of those that wait.

    Parameters
    ----------
    selected, waiting
        The rows of each part, and those that wait, whose ids are wanted; None for all that were not removed.
    """
    for number, part in enumerate(parts):
        bits = part.alive if selected is None else selected[number]
        for start in range(0, len(part), _BLOCK_IDS):
            rows = np.arange(start, min(start + _BLOCK_IDS, len(part)))
            if bits is not None:
                rows = rows[unpack(bits[start // 64 : -(-(start + len(rows)) // 64)], len(rows))]
            if len(rows):
                yield ids_of(part, rows).values()
    if len(chosen := np.arange(len(fresh)) if waiting is None else np.flatnonzero(waiting)):
        yield Ids(fresh.ids, fresh.texts).take(chosen).values()


class Sightings:
    """The places of the vectors that a search found, to read their strings and fields at its end.

    Parameters
    ----------
    parts, fresh
        Of the snapshot searched.
    """

    def __init__(self, parts: Sequence[RowPart], fresh: Fresh) -> None:
        self._parts, self._fresh = parts, fresh
        self._ids: list[Ints] = []
        self._positions: list[Ints] = []

    def note(self, found: Ints, positions: Ints) -> None:
        """Note the positions of vectors found; an id of -1 is none."""
        self._ids.append(found[found != -1])
        self._positions.append(positions[found != -1])

    def named(self, found: Ints, tally: Tallies) -> npt.NDArray[np.object_]:
        """Return the strings of the ids found, of the shape of `found`, None for -1; `tally` as in a read."""
        numbers, inverse = np.unique(found, return_inverse=True)
        real = numbers >= 0  # hashes are never negative
        names = np.full(len(numbers), None, np.object_)
        names[real] = texts_at(self._parts, self._fresh, self.places(numbers[real]), tally).objects()
        return names[inverse].reshape(found.shape)

    def places(self, wanted: Ints) -> Located:
        """Return the places of ids, int64 ``[n]``, all of them found."""
        ids = np.concatenate([np.empty(0, np.int64), *self._ids])
        positions = np.concatenate([np.empty(0, np.int64), *self._positions])
        rows = _rows_of(wanted, ids)
        # The search holds its snapshot, so the parts are still there.
        positions = np.where(rows >= 0, positions[rows] if len(ids) else -1, -1)
        return Located(positions, _rows_of(wanted, self._fresh.ids))


def _clash(one: str, other: str) -> str:
    return f"{one!r} has the same 63-bit hash as {other!r}: give one of the vectors another id"


def _short(ids: object) -> str:
    text = repr(ids)
    return text if len(text) <= 60 else text[:60] + "..."
