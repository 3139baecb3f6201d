"""Results as Markdown for a document: every table under the command that makes it."""

from collections.abc import Iterator, Sequence

from memhier.benchmarks.bench.results import Row
from memhier.benchmarks.bench.summary import script_records
from memhier.benchmarks.bench.tables import (
    Sheet,
    command_of,
    figure_sheet,
    problem_sheets,
    search_sheets,
    search_sizes,
    warnings_of,
)

__all__ = ["markdown"]


def markdown(rows: list[Row]) -> str:
    """Return the figures of every workload, and the problems."""
    return "\n".join(_lines(rows))


def _lines(rows: list[Row]) -> Iterator[str]:
    for workload, size in search_sizes(rows):
        yield f"### {workload} ({size})\n\n`{command_of(workload, size)}`\n"
        for sheet in search_sheets(rows, workload, size):
            yield f"{sheet.caption}:\n"
            yield _table(sheet)
    for row, record in script_records(rows).values():
        yield f"### {row['workload']} ({row['size']})\n\n`{command_of(row['workload'], row['size'])}`\n"
        if record.scale:
            yield f"{record.scale}\n"
        yield _table(figure_sheet(record))
    for sheet in problem_sheets(rows):
        yield f"### {sheet.caption}\n"
        yield _table(sheet)
    yield from (f"{words}\n" for words in warnings_of(rows))


def _table(sheet: Sheet) -> str:
    lines: list[Sequence[str]] = [sheet.titles, ["---"] * len(sheet.titles), *sheet.rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
