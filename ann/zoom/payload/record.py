"""The record of a row: its documents, which are text, bytes or JSON values, by the numbers of their names.

A record holds the documents in the order of their numbers, each a header and its contents. A row without documents has
a record of no bytes.
"""

import json
import struct
from collections.abc import Mapping
from datetime import date
from typing import Any, TypeAlias

import numpy as np

from memhier.errors import CorruptionError

__all__ = ["Document", "decode", "encode", "is_missing", "pack", "unpack"]

Document: TypeAlias = tuple[int, bytes]
"""The kind of a document, and its contents."""

_HEADER = struct.Struct("<HBI")  # number of the name, kind, bytes of the contents
_BYTES, _TEXT, _JSON = 0, 1, 2
_BYTES_MOST = 2**32 - 1
_DEPTH_MOST = 100
# Of libraries that are not imported here.
_MISSING_TYPES = frozenset({"NoneType", "NAType", "NaTType", "MaskedConstant"})


def is_missing(value: object) -> bool:
    """Whether a value stands for none: None, NaN, NaT and pandas.NA."""
    if isinstance(value, float | np.floating):
        return bool(value != value)
    return type(value).__name__ in _MISSING_TYPES


def encode(value: Any, where: str) -> Document:
    """Return a document of a value that is not missing; `where` names it in errors.

    Raises
    ------
    TypeError
        For a value that is no text, bytes or JSON value.
    ValueError
        For JSON that is nested more than a hundred levels deep, and integers of more digits than Python converts.
    """
    if isinstance(value, str):
        made = (_TEXT, value.encode(errors="surrogatepass"))
    elif isinstance(value, bytes | bytearray | memoryview):
        made = (_BYTES, bytes(value))
    else:
        _check_json(value, where, 0)
        try:
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=np.generic.item)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        made = (_JSON, text.encode(errors="surrogatepass"))
    if len(made[1]) > _BYTES_MOST:
        raise ValueError(f"{where} has {len(made[1]):,} bytes: expected at most {_BYTES_MOST:,}")
    return made


def decode(document: Document, where: object) -> Any:
    """Return the value of a document; CorruptionError, which names `where`, if its bytes are none."""
    kind, contents = document
    try:
        if kind == _BYTES:
            return contents
        text = contents.decode(errors="surrogatepass")
        return text if kind == _TEXT else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{where}: a document is damaged: {error}") from error


def pack(documents: Mapping[int, Document]) -> bytes:
    """Return the record of documents by number."""
    pieces: list[bytes] = []
    for number, (kind, contents) in sorted(documents.items()):
        pieces += (_HEADER.pack(number, kind, len(contents)), contents)
    return b"".join(pieces)


def unpack(record: bytes, where: object) -> dict[int, Document]:
    """Return the documents of a record by number; CorruptionError, which names `where`, if it holds something else."""
    documents, at = {}, 0
    while at < len(record):
        start = at + _HEADER.size
        number, kind, size = _HEADER.unpack_from(record, at) if start <= len(record) else (0, _JSON + 1, 0)
        at = start + size
        if kind > _JSON or at > len(record):
            raise CorruptionError(f"{where}: {len(record)} bytes are no record of documents")
        documents[number] = (kind, record[start:at])
    return documents


def _check_json(value: Any, where: str, depth: int) -> None:
    """Refuse a value that would come back as another."""
    if value is None or isinstance(value, str | bool | int | float | np.bool_ | np.integer | np.floating):
        return
    if depth == _DEPTH_MOST:
        raise ValueError(f"{where} is nested more than {_DEPTH_MOST} levels deep")
    if isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}: expected text, as JSON has no other keys")
            _check_json(each, where, depth + 1)
    elif isinstance(value, list | tuple):
        for each in value:
            _check_json(each, where, depth + 1)
    else:
        moment = isinstance(value, date | np.datetime64)
        hint = "; attributes= takes datetimes, and .isoformat() makes text of one" if moment else ""
        hint = "; give an array as a list (.tolist())" if isinstance(value, np.ndarray) else hint
        raise TypeError(
            f"{where} holds a {type(value).__name__}: expected text, bytes or a JSON value (dict, list, number, bool, "
            f"None){hint}"
        )
