"""Results as Markdown for a document: every table under the command that makes it."""

from collections.abc import Iterator, Sequence

from memhier.benchmarks.bench.results import Row
from memhier.benchmarks.bench.summary import METRICS, TARGETS, script_records
from memhier.benchmarks.bench.tables import (  # fmt: skip
    BUILD_TITLES,
    FIGURE_TITLES,
    builds_of,
    command_of,
    figure_cells,
    problem_rows,
    search_cells,
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
        titles = ("peer", *(label for label, _ in METRICS.values()))
        for target in TARGETS:
            cells = [[peer, *line] for peer, line in search_cells(rows, workload, size, target).items()]
            yield f"At recall@10 {target}, medians over rounds, interpolated between efforts:\n"
            yield _table(titles, cells)
        yield "Builds and memory:\n"
        yield _table(BUILD_TITLES, builds_of(rows, workload, size))
    for row, record in script_records(rows).values():
        yield f"### {row['workload']} ({row['size']})\n\n`{command_of(row['workload'], row['size'])}`\n"
        if record.scale:
            yield f"{record.scale}\n"
        yield _table(FIGURE_TITLES, figure_cells(record))
    problems = problem_rows(rows)
    if problems:
        yield "### Not measured\n"
        yield _table(("workload", "peer", "what", "why"), problems)
    yield from (f"{words}\n" for words in warnings_of(rows))


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
