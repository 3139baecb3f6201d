"""Results as JSON lines, written one by one, so that an interrupted run goes on from the last."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from memhier.benchmarks.bench.figures import Record
from memhier.errors import FormatError, LockedError

__all__ = ["Results", "Row", "hold_alone", "read_rows"]

Row: TypeAlias = dict[str, Any]

_TASK = {"workload", "size"}
# The keys that a row of each kind must hold to be shown; versions add and drop others.
_NEEDED = {
    "machine": {"load", "device"},
    "state": {*_TASK, "state"},
    "data": _TASK,
    "failed": {*_TASK, "why"},
    "skipped": {*_TASK, "why"},
    "build": {*_TASK, "peer", "version", "cpu_s", "peak_private_bytes", "file_bytes", "raw_bytes", "dram_bytes",
              "vectors"},
    "search": {*_TASK, "peer", "round", "rows", "held_bytes", "settings"},
    "script": {*_TASK, "figures", "words", "command", "settings", "wall_s"},
}  # fmt: skip
_NEEDED_OF_EFFORT = {
    "effort", "recall", "recall_id", "cpu_ms", "mean_ms", "p50_ms", "p99_ms", "pages", "private_bytes", "cached_bytes",
}  # fmt: skip


class Results:
    """A file of rows, each the outcome of one task.

    The next run tries a failed or skipped task again; its later row replaces the earlier.

    Raises
    ------
    ValueError
        As :func:`read_rows`.

    Examples
    --------
    >>> import tempfile
    >>> results = Results(Path(tempfile.mkdtemp()) / "results.jsonl")
    >>> results.add("search/quick/diskann/0", kind="failed", workload="search", size="quick", why="not installed")
    >>> results.is_done("search/quick/diskann/0")
    False
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows = {row["task"]: row for row in read_rows(path)} if path.exists() else {}
        if path.exists():
            # A run that was killed may have left half a line: the next row needs a line of its own.
            _end_last_line(path)

    def is_done(self, task: str, settings: str = "") -> bool:
        """Return whether a task has an outcome, by the same settings, that need not be tried again."""
        row = self._rows.get(task)
        return row is not None and row["kind"] not in ("failed", "skipped") and row.get("settings", "") == settings

    def add(self, task: str, **row: Any) -> None:
        """Append the outcome of a task."""
        self._rows[task] = {"task": task, **row}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self._rows[task]) + "\n")

    def rows(self) -> list[Row]:
        """Return the latest row of each task."""
        return list(self._rows.values())


@contextmanager
def hold_alone(path: Path, option: str) -> Iterator[None]:
    """Hold a file, which is made if it is missing, against other processes while the block runs.

    Raises
    ------
    LockedError
        When another process holds it; the message begins with `option`, which named the file.
    """
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LockedError(f"{option} {path} is in use by another run: wait for its end, or name another") from error
        yield


def read_rows(path: Path) -> list[Row]:
    """Return the latest row of each task in a file of results.

    A row of another version that lacks a key comes back as a task that failed.

    Raises
    ------
    FormatError
        When a line before the last is no row; a last one that was cut short is left out.
    """
    rows: dict[str, Row] = {}
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines):
        row = _parse(line)
        if row is not None:
            rows[row["task"]] = row if _is_whole(row) else _of_another_version(row)
        elif line.strip() and number < len(lines) - 1:
            shown = line[:60].decode("utf-8", "backslashreplace")
            raise FormatError(
                f"{path}, line {number + 1}: not a row of results: {shown!r}: without this line the rest can be read, "
                "and a run measures its task again"
            )
    return list(rows.values())


def _parse(line: bytes) -> Row | None:
    """Return a row that names its task and kind, and of all but a machine the workload."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("task"), str) or not isinstance(row.get("kind"), str):
        return None
    return row if row["kind"] == "machine" or row.keys() >= _TASK else None


def _is_whole(row: Row) -> bool:
    if not row.keys() >= _NEEDED.get(row["kind"], set()):
        return False
    try:
        if row["kind"] == "search":
            return all(point.keys() >= _NEEDED_OF_EFFORT for point in row["rows"])
        if row["kind"] == "script":
            Record.read(row["figures"])
    except (AttributeError, LookupError, TypeError, ValueError):
        return False
    return True


def _of_another_version(row: Row) -> Row:
    about: Row = {key: row[key] for key in ("workload", "size", "peer") if key in row}
    why = f"its {row['kind']} was written by another version of memhier: run it again"
    return {"task": row["task"], "kind": "failed", "stage": "results", "why": why, "workload": "", "size": "", **about}


def _end_last_line(path: Path) -> None:
    raw = path.read_bytes()
    end = raw.rfind(b"\n") + 1
    if end == len(raw):
        return
    with path.open("r+b") as file:
        if _parse(raw[end:]) is None:
            file.truncate(end)
        else:
            file.seek(0, 2)
            file.write(b"\n")
