"""Results as JSON lines: written as they come, so that a run that was interrupted goes on where it stopped."""

import json
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["Results", "Row", "read_rows"]

Row: TypeAlias = dict[str, Any]


class Results:
    """A file of rows, each the outcome of one task.

    A task that failed or was skipped is tried again by the next run; its later row stands for it.

    Examples
    --------
    >>> import tempfile
    >>> results = Results(Path(tempfile.mkdtemp()) / "results.jsonl")
    >>> results.add("search/quick/diskann/0", kind="failed", why="not installed")
    >>> results.is_done("search/quick/diskann/0")
    False
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows = {row["task"]: row for row in read_rows(path)} if path.exists() else {}
        if path.exists():
            # A run that was killed may have left half a line: what follows it has to start on its own.
            _end_last_line(path)

    def is_done(self, task: str, settings: str = "") -> bool:
        """Return whether a task has an outcome, by the same settings, that need not be tried again."""
        row = self._rows.get(task)
        return row is not None and row["kind"] not in ("failed", "skipped") and row.get("settings", "") == settings

    def add(self, task: str, **row: Any) -> None:
        """Append the outcome of a task."""
        self._rows[task] = {"task": task, **row}
        with self._path.open("a") as file:
            file.write(json.dumps(self._rows[task]) + "\n")

    def rows(self) -> list[Row]:
        """Return the latest row of each task."""
        return list(self._rows.values())


def read_rows(path: Path) -> list[Row]:
    """Return the latest row of each task in a file of results.

    Raises
    ------
    ValueError
        When a line before the last is no row; a last one that was cut short is left out.
    """
    lines = path.read_text().splitlines()
    rows: dict[str, Row] = {}
    for number, line in enumerate(lines):
        try:
            row = json.loads(line)
            rows[row["task"]] = row
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) - 1 or not line.strip():
                continue
            raise ValueError(f"{path}, line {number + 1}: not a row of results: {line[:60]!r}") from error
    return list(rows.values())


def _end_last_line(path: Path) -> None:
    text = path.read_text()
    if text and not text.endswith("\n"):
        path.write_text(text[: text.rfind("\n") + 1])
