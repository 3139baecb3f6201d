"""The working memory of look-ups in tables that are only read."""

from memhier.io.reader import Reader

__all__ = ["CALL_ID_BYTES", "call_rows_of", "reader_bytes"]

CALL_ID_BYTES = 96
"""Of an id in a call: sorted, its place, its row's number, the request of its read."""

_CALL_SHARE = 8
_CALL_ROWS_MAX = 2**16
_READERS_MAX = 4


def call_rows_of(room: int, threads: int, row_bytes: int) -> tuple[int, int]:
    """Return the most rows of a call, and the working memory of the calls of all threads, by the bytes of a row."""
    row_bytes += CALL_ID_BYTES
    rows = max(1, min(room // _CALL_SHARE // threads // row_bytes, _CALL_ROWS_MAX))
    return rows, rows * row_bytes * threads


def reader_bytes(reader: Reader, threads: int) -> int:
    """Return the most that a reader will hold for so many threads."""
    return min(threads, _READERS_MAX) * reader.planned_bytes
