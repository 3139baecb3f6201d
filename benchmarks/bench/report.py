"""Results as one HTML file: plots, tables, the machine, and an explanation of each."""

from collections.abc import Sequence
from html import escape

from memhier.benchmarks.bench.compare import change_cells, changes
from memhier.benchmarks.bench.figures import Record
from memhier.benchmarks.bench.papers import PAPER_TITLES, papers_rows
from memhier.benchmarks.bench.plot import Line, bars_plot, curves_plot, line_plot
from memhier.benchmarks.bench.results import Row
from memhier.benchmarks.bench.summary import METRICS, curve, script_records, search_peers
from memhier.benchmarks.bench.tables import (
    command_of,
    figure_sheet,
    number,
    problem_sheets,
    search_sheets,
    search_sizes,
    warnings_of,
)

__all__ = ["write_report"]

_STYLE = """
body{font:15px/1.5 sans-serif;max-width:1360px;margin:2em auto;padding:0 1em;color:#1b1b1b}
table{border-collapse:collapse;margin:1em 0;font-size:13px}td,th{border:1px solid #ccc;padding:3px 8px;text-align:right}
td:first-child,th:first-child{text-align:left}.words td{text-align:left}.plots{display:flex;flex-wrap:wrap;gap:1em}
.plots svg{width:640px;max-width:100%;background:#fff}
figure{margin:0}figcaption{font-weight:bold;margin:.3em 0}.warn{background:#fff4d6;padding:.5em 1em}
pre{overflow-x:auto;background:#f6f6f6;padding:1em;font-size:12px;line-height:1.25}
"""
_READING = """
<p>Each point of a plot is one setting of a peer's search parameters. Points further right find more, and the axis opens
up towards 1. Recall@10 is by distance: an answer counts if it is as near as the true tenth neighbour. <b>Reads</b> are
4 KiB pages fetched from the device, as the kernel counts them for the process. <b>Queries a CPU second</b> divides by
processor time, which neighbours disturb least, and counts a whole batch in one call if a peer offers one that finds as
much. Latencies are of single queries on the clock. All peers search with one thread, start cold and have the same
budget of DRAM. Peers that bypass the page cache use the rest of the budget as they like. Peers that fill the page cache
lose pages at random after any query that leaves more than the budget allows. Peers that map their files are swept with
the device's read-ahead and without. RLIMIT_DATA caps allocations at the budget plus the stacks of the peer's threads;
the table of builds shows the memory that a peer really held. Figures at a recall are interpolated, linearly in recall,
between the two settings around it.</p>
"""
_READING_SCRIPTS = """
<p>Each of these is a program that brings its own rivals; its command line stands above its figures. A figure is the
median over rounds, with the least and the greatest beside it. <b>Clock</b> marks wall time, which neighbours disturb.
<b>Counted</b> marks figures that are the same in every run. The line across the end of a bar is its spread. Lower
miss-ratio curves are better; no policy goes below Belady, which knows the future. A curve over DRAM shows, from left to
right, the gain of another megabyte.</p>
"""
# A longer table of figures is folded up.
_SHOWN = 30
_PLOTS = ("qps_core", "pages", "p50_ms", "p99_ms")


def write_report(rows: list[Row], when: str, old: list[Row] | None = None) -> str:
    """Return the report; with older results, changes beyond noise come first."""
    parts = [f"<h1>memhier bench</h1><p>{escape(when)}</p>", _machines(rows)]
    if old is not None:
        cells = change_cells(changes(old, rows))
        parts.append("<h2>Changes</h2>")
        parts.append(_table(("where", "metric", "old", "new", ""), cells) if cells else "<p>None beyond noise.</p>")
    if not any(row["kind"] in ("search", "script") for row in rows):
        parts.append("<p>Nothing was measured.</p>")
    parts += [f"<h2>{sheet.caption}</h2>{_table(sheet.titles, sheet.rows, 'words')}" for sheet in problem_sheets(rows)]
    sizes = search_sizes(rows)
    if sizes:
        parts.append("<h2>Search</h2>" + _READING)
    parts += [_search(rows, workload, size) for workload, size in sizes]
    scripts = script_records(rows)
    if scripts:
        parts.append("<h2>The other groups</h2>" + _READING_SCRIPTS)
    parts += [_script(row, record) for row, record in scripts.values()]
    parts.append("<h2>The papers</h2>")
    parts.append(_table(PAPER_TITLES, papers_rows(rows), "words"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>memhier bench</title>'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style></head><body>{"".join(parts)}</body></html>\n'
    )


def _machines(rows: list[Row]) -> str:
    machines = [row for row in rows if row["kind"] == "machine"]
    parts = []
    parts += [f'<p class="warn">{escape(words)}</p>' for words in warnings_of(rows)]
    for machine in machines[-1:]:
        device = machine["device"]
        named = {key: value for key, value in machine.items() if key not in ("task", "kind", "device")}
        cells = [[key, str(value)] for key, value in (named | {f"device: {k}": v for k, v in device.items()}).items()]
        parts.append(f"<details><summary>Machine</summary>{_table(('', ''), cells, 'words')}</details>")
    return "".join(parts)


def _search(rows: list[Row], workload: str, size: str) -> str:
    curves = {peer: curve(rounds) for peer, rounds in search_peers(rows, workload, size).items()}
    plots = []
    for metric in _PLOTS:
        lines = [
            Line(peer, [
                (point.recall, point.figures[metric][0],
                 f"recall {point.recall:.4f}, {number(point.figures[metric][0])} {METRICS[metric][0]}, {point.effort}")
                for point in points
            ])
            for peer, points in curves.items()
        ]  # fmt: skip
        plots.append(line_plot(lines, "recall@10", METRICS[metric][0], less_is_better=METRICS[metric][1]))
    command = f"<p><code>{escape(command_of(workload, size))}</code></p>"
    parts = [f"<h3>{escape(workload)} ({size})</h3>{command}", f'<div class="plots">{"".join(plots)}</div>']
    sheets = search_sheets(rows, workload, size)
    parts += [f"<h4>{sheet.caption}</h4>{_table(sheet.titles, sheet.rows)}" for sheet in sheets]
    return "".join(parts)


def _script(row: Row, record: Record) -> str:
    sheet = figure_sheet(record)
    plots = [*map(curves_plot, record.curves), *map(bars_plot, record.bars)]
    scale = f"<p>{escape(record.scale)}</p>" if record.scale else ""
    return (
        f"<h3>{escape(row['workload'])} ({row['size']})</h3>"
        f"<p><code>{escape(row['command'])}</code>, {row['wall_s']:,.0f} s</p>{scale}"
        f'<div class="plots">{"".join(plots)}</div>'
        f"<details{' open' if len(sheet.rows) <= _SHOWN else ''}><summary>{len(sheet.rows)} figures</summary>"
        f"{_table(sheet.titles, sheet.rows)}</details>"
        f"<details><summary>What the program printed</summary><pre>{escape(row['words'])}</pre></details>"
    )


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<table class="{kind}"><tr>{head}</tr>{body}</table>'


def _cell(text: str) -> str:
    return escape(text).replace("\n", "<br>")
