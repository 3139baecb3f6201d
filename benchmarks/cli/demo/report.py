"""The output of the demo: the table of its figures, commands to try next, and the answers to a query."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from memhier.benchmarks.cli.demo.measure import DECLARED, Cost
from memhier.benchmarks.cli.demo.run import Answer, Report
from memhier.benchmarks.cli.shell import Terminal, new_table
from memhier.budget import format_bytes

__all__ = ["print_answers", "print_next_steps", "print_report"]


def print_report(terminal: Terminal, report: Report) -> None:
    """Print the figures: of the build, of the index before and after it was tuned, and the seconds of each stage."""
    terminal.print("memhier demo")
    terminal.print(_built(report))
    terminal.print(f"{report.queries:,} sentences asked one at a time, cold; {report.tuning:,} others to tune")
    terminal.print(_costs(report))
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in report.seconds.items())
    terminal.print(Text(f"Seconds: {stages}; together {sum(report.seconds.values()):.1f}", "dim"))


def _built(report: Report) -> Table:
    index, corpus = report.index, report.corpus
    held, raw, vectors = index["memory_bytes"], index["vector_bytes"], index["vectors"]
    left_out = f"; {corpus.duplicates:,} copies left out"
    if corpus.unreadable:
        left_out += f", {corpus.unreadable:,} files unreadable"
    io = "direct I/O" if index["direct"] else "buffered, so not cold: the file system refuses direct I/O"
    table = new_table(("", "left"), ("", "left"), header=False)
    for name, figure in (
        ("functions and classes", f"{vectors:,} in {corpus.files:,} files{left_out}"),
        ("vectors", f"{vectors:,} x {index['dimension']} {index['dtype']}"),
        ("raw vectors, on SSD", f"{format_bytes(raw)}"),
        ("index, in DRAM", f"{format_bytes(held)}: {held / vectors:,.0f} bytes a vector, {held / raw:.1%} of raw"),
        ("I/O engine", f"{index['engine']}, {io}"),
        ("device under", report.path),
    ):
        table.add_row(name, figure)
    return table


def _costs(report: Report) -> Table:
    both = [next(cost for cost in costs if cost.declared == DECLARED) for costs in (report.as_built, report.tuned)]
    table = new_table(("", "left"), *((name, "right") for name in ("as built", "tuned", "exact search")))
    table.add_row("recall@10 declared", *(_declared(cost) for cost in both))
    table.add_row("recall@10 measured", *(f"{cost.recall:.4f}" for cost in both), "1.0000")
    table.add_row("function found in first 10", *(f"{cost.found:.1%}" for cost in both), f"{report.found_exact:.1%}")
    table.add_row("latency p50, ms", *(f"{cost.p50_ms:.2f}" for cost in both))
    table.add_row("latency p99, ms", *(f"{cost.p99_ms:.2f}" for cost in both))
    table.add_row("page reads per query", *(f"{cost.pages:,.1f}" for cost in both))
    table.add_row("codes scanned per query", *(f"{cost.scanned:,.0f}" for cost in both))
    return table


def _declared(cost: Cost) -> str:
    return f"{cost.declared:g}" if cost.calibrated else f"{cost.declared:g}, not calibrated"


def print_next_steps(terminal: Terminal, report: Report) -> None:
    """Print commands to try next."""
    terminal.print("\nTry next:")
    for line in (
        'memhier demo --query "parse a date from text"',
        f"memhier demo --dram {format_bytes(report.index['memory_bytes'] * 3 // 4).replace(' ', '')}"
        "    (less memory: shorter codes, more reads for the same recall)",
        f"memhier probe {report.path}    (the speed of this device)",
    ):
        terminal.print(f"  {line}")


def print_answers(terminal: Terminal, query: str, answers: Sequence[Answer]) -> None:
    """Print the functions nearest to a query, nearest first."""
    terminal.print(Text(f"nearest to {query!r}:", "bold"))
    for found in answers:
        function = found.function
        terminal.print(f"{function.path}:{function.line}", style="cyan")
        terminal.print(f"  {found.distance:.3f}  {function.name}")
        terminal.print(f"         {function.signature}", style="dim")
