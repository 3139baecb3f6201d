"""``memhier bench``: list, run, compare, report, install, papers."""

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from memhier.benchmarks.bench.compare import compare_rows
from memhier.benchmarks.bench.listing import describe_peer, describe_workload, peer_lines, workload_lines
from memhier.benchmarks.bench.markdown import markdown
from memhier.benchmarks.bench.papers import SHIPPED_RESULTS, papers_table
from memhier.benchmarks.bench.report import write_report
from memhier.benchmarks.bench.results import Results, Row, hold_alone, read_rows
from memhier.benchmarks.bench.runner import Plan
from memhier.benchmarks.bench.runner import run as run_plan
from memhier.benchmarks.bench.tables import tables, warnings_of
from memhier.benchmarks.bench.workload import GROUPS, Workload, load_workloads
from memhier.benchmarks.cli.plain_errors import BadArgument, Interrupted
from memhier.benchmarks.cli.shell import Terminal
from memhier.benchmarks.datasets import use_data_folder
from memhier.benchmarks.peers import PEERS
from memhier.benchmarks.peers.process import PeerError, default_environments, install_group, install_peer, peer_version
from memhier.benchmarks.peers.worker import make_peer

__all__ = ["bench"]

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class _NewFile(click.Path):
    """A file to write in an existing folder: a missing one is an error before an hour of work, not after it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(str(super().convert(value, param, ctx)))
        if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
            self.fail(f"{path}: its folder is missing or cannot be written to", param, ctx)
        return path


_NEW_FILE = _NewFile(dir_okay=False, writable=True)
_environments = click.option("--envs", type=click.Path(file_okay=False, path_type=Path), default=None,
                             help="The peers' environments; ~/.cache/memhier/peers by default.")  # fmt: skip


@click.group()
def bench() -> None:
    """Measure memhier beside its rivals, in one run, on this machine."""


@bench.command("list")
@click.argument("names", nargs=-1)
@click.option("--verbose", is_flag=True, help="Show the details of each.")
@_environments
def list_(names: tuple[str, ...], verbose: bool, envs: Path | None) -> None:
    """Show workloads and peers.

    Prints a line for each, or the details of NAMES: parameters, peers, traps.
    """
    console, environments, workloads = Terminal(), envs or default_environments(), load_workloads()
    known = [*(workload.name for workload in workloads), *PEERS]
    for name in names:
        if name not in known:
            raise BadArgument(f"there is no workload or peer {name!r}: expected one of {', '.join(known)}")
    if not names and not verbose:
        for line in ("Workloads", *workload_lines(workloads), "", "Peers of search", *peer_lines(environments)):
            console.print(line, no_wrap=True, overflow="ellipsis")
        console.print("\nmemhier bench list NAME shows the details; memhier bench install GROUP gets peers.")
        return
    asked = names or known
    told = [describe_workload(workload) for workload in workloads if workload.name in asked]
    told += [describe_peer(peer, environments) for peer in PEERS if peer in asked]
    for paragraph in told:
        for part in paragraph:
            console.print(part)


@bench.command()
@click.argument("names", nargs=-1)
@click.option("--suite", "size", type=click.Choice(["quick", "full"]), default="quick", show_default=True,
              help="Every workload has both sizes.")  # fmt: skip
@click.option("--group", "groups", multiple=True, type=click.Choice(GROUPS), help="Only workloads of this group.")
@click.option("--peer", "only", multiple=True, help="Only these peers or adapters, and workloads with one of them.")
@click.option("--results", "results_path", type=_NEW_FILE,
              default=Path("bench.jsonl"), show_default=True,
              help="Rows of results; tasks with a row are not run again.")  # fmt: skip
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), default=None,
              help="A folder on the device to measure; data and indexes stay there for the next run. "
                   "~/.cache/memhier/bench by default.")  # fmt: skip
@_environments
@click.option("--data", type=click.Path(file_okay=False, path_type=Path), envvar="MEMHIER_DATA", default=None,
              help="The folder of data sets.")  # fmt: skip
@click.option("--report", "report_path", type=_NEW_FILE, help="Write an HTML report.")
@click.option("--resume", is_flag=True, help="Go on with the parts that workloads such as replay-paper keep in --work.")
def run(
    names: tuple[str, ...], size: str, groups: tuple[str, ...], only: tuple[str, ...], results_path: Path,
    work: Path | None, envs: Path | None, data: Path | None, report_path: Path | None, resume: bool,
) -> None:  # fmt: skip
    """Run the workloads NAMES, or all of them."""
    chosen = _choose(names, groups, only)
    if data is not None:
        use_data_folder(data)
    place = work or default_environments().parent / "bench"
    plan = Plan(chosen, "quick" if size == "quick" else "full", place, envs or default_environments(), only, resume)
    place.mkdir(parents=True, exist_ok=True)
    # Two runs would disturb each other's figures, and write into each other's files.
    with hold_alone(results_path, "--results:"), hold_alone(place / "lock", "--work:"):
        results = Results(results_path)
        whole = _run(plan, results)
        _show(results.rows())
        if report_path is not None:
            _write(results.rows(), report_path)
    if not whole:
        raise Interrupted(f"interrupted: the same command goes on where {results_path} stops")


def _run(plan: Plan, results: Results) -> bool:
    """Run the plan with its progress on the terminal; return whether it finished."""
    console = Terminal(stderr=True)
    with console.status("starting", spinner="line") as status:

        def say(words: str) -> None:
            # Not by `log`, which fills each line to the width of a file.
            console.print(f"[{time.strftime('%H:%M:%S')}] {words}")
            status.update(words)

        try:
            run_plan(plan, results, say)
        except KeyboardInterrupt:
            return False
    return True


@bench.command()
@click.argument("old", type=_FILE)
@click.argument("new", type=_FILE)
def compare(old: Path, new: Path) -> None:
    """Compare two files of results.

    Flags changes from OLD to NEW beyond noise; the exit code is 1 on a regression.
    """
    table, regressions = compare_rows(_read(old), _read(new))
    Terminal().print(table)
    if regressions:
        raise SystemExit(1)


@bench.command()
@click.argument("results", type=_FILE)
@click.option("--out", type=_NEW_FILE, default=Path("bench.html"), show_default=True)
@click.option("--compare", "against", type=_FILE, help="Older results; the report shows changes beyond noise.")
@click.option("--markdown", "as_markdown", is_flag=True,
              help="Print the tables of figures as Markdown instead, each under its command.")  # fmt: skip
def report(results: Path, out: Path, against: Path | None, as_markdown: bool) -> None:
    """Write RESULTS as one HTML file that needs nothing else."""
    rows = _read(results)
    if as_markdown:
        click.echo(markdown(rows), nl=False)
    else:
        _write(rows, out, None if against is None else _read(against))


def _write(rows: list[Row], out: Path, old: list[Row] | None = None) -> None:
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    # The page declares UTF-8; a program may have printed other bytes.
    out.write_text(write_report(rows, when, old), encoding="utf-8", errors="backslashreplace")
    Terminal(stderr=True).print(f"Report: {out}", soft_wrap=True)


@bench.command()
@click.argument("group", type=click.Choice(GROUPS))
@click.option("--peer", "only", multiple=True, type=click.Choice([name for name in PEERS if name != "memhier"]),
              help="Only these peers of search.")  # fmt: skip
@_environments
def install(group: str, only: tuple[str, ...], envs: Path | None) -> None:
    """Install the peers of GROUP.

    Each peer of search gets an environment of its own; those of another group share one.
    """
    if group != "search":
        _install_for_scripts(group, envs or default_environments())
        return
    failed = []
    for name in only or [name for name in PEERS if name != "memhier"]:
        peer = make_peer(name)
        with Terminal(stderr=True).status(f"installing {peer.package}", spinner="line"):
            try:
                python = install_peer(peer, envs or default_environments())
                Terminal().print(f"{name}: {peer.package} {peer_version(peer, python)}")
            except PeerError as error:
                failed.append(name)
                Terminal().print(f"{name}: {error}")
    if failed:
        raise click.ClickException(f"not installed: {', '.join(failed)}")


def _install_for_scripts(group: str, environments: Path) -> None:
    found = [load.parameters.get("install", ()) for load in load_workloads() if load.group == group]
    requirements = list(dict.fromkeys(requirement for some in found for requirement in some))
    if not requirements:
        raise BadArgument(f"the workloads of {group} ask for no other packages")
    try:
        with Terminal(stderr=True).status(f"installing {', '.join(requirements)}", spinner="line"):
            python = install_group(group, requirements, environments)
    except PeerError as error:
        raise click.ClickException(str(error)) from error
    Terminal().print(f"{group}: {', '.join(requirements)} for {python}", soft_wrap=True)


@bench.command()
@click.argument("results", type=_FILE, required=False)
def papers(results: Path | None) -> None:
    """Print each paper's headline beside measured figures.

    The figures are those in RESULTS, with the differences of scale. Without RESULTS the command shows the figures that
    come with memhier; the last line names their machine and day.
    """
    Terminal().print(papers_table(_read(results or SHIPPED_RESULTS)))


def _choose(names: tuple[str, ...], groups: tuple[str, ...], only: tuple[str, ...]) -> list[Workload]:
    """Return the workloads that the options name: with peers given, those that have one of them."""
    workloads = load_workloads()
    known = {workload.name for workload in workloads}
    for name in names:
        if name not in known:
            raise BadArgument(f"there is no workload {name!r}: expected one of {', '.join(sorted(known))}")
    chosen = [
        workload
        for workload in workloads
        if (not names or workload.name in names) and (not groups or workload.group in groups)
    ]
    if not chosen:
        raise BadArgument(f"none of {', '.join(names)} is of the group {', '.join(groups)}")
    peers = {load.name: {name for peer in load.peers for name in (peer.name, peer.adapter)} for load in chosen}
    unknown = set(only) - set().union(*peers.values())
    if unknown:
        raise BadArgument(f"--peer {', '.join(sorted(unknown))}: no workload asked for has it")
    return [load for load in chosen if not only or peers[load.name] & set(only)]


def _read(path: Path) -> list[Row]:
    try:
        return read_rows(path)
    except ValueError as error:
        raise click.ClickException(str(error)) from error


def _show(rows: list[Row]) -> None:
    console = Terminal()
    for row in rows:
        if row["kind"] == "script":
            console.print(row["workload"], style="bold")
            console.print(row["words"])
    for table in tables(rows):
        console.print(table)
    for words in warnings_of(rows):
        console.print(words)
