"""``memhier bench``: list, run, compare, report, install, papers."""

from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from memhier.benchmarks.bench.compare import compare_rows
from memhier.benchmarks.bench.papers import papers_table
from memhier.benchmarks.bench.report import write_report
from memhier.benchmarks.bench.results import Results, Row, read_rows
from memhier.benchmarks.bench.runner import Plan
from memhier.benchmarks.bench.runner import run as run_plan
from memhier.benchmarks.bench.tables import tables
from memhier.benchmarks.bench.workload import GROUPS, Workload, load_workloads
from memhier.benchmarks.datasets import use_data_folder
from memhier.benchmarks.machine import is_loaded
from memhier.benchmarks.peers import PEERS
from memhier.benchmarks.peers.process import (
    PeerError,
    default_environments,
    find_python,
    install_group,
    install_peer,
    peer_version,
)
from memhier.benchmarks.peers.worker import make_peer

__all__ = ["bench"]

_WIDTH = 130
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_environments = click.option("--envs", type=click.Path(file_okay=False, path_type=Path), default=None,
                             help="The peers' environments; ~/.cache/memhier/peers by default.")  # fmt: skip


@click.group()
def bench() -> None:
    """Measure memhier next to its rivals, in one run, on this machine."""


@bench.command("list")
@_environments
def list_(envs: Path | None) -> None:
    """Show workloads, and which peers are installed."""
    console = Console()
    table = Table("workload", "group", "about", "peers", title="Workloads")
    for workload in load_workloads():
        names = ", ".join(peer.name for peer in workload.peers) or "its own"
        table.add_row(workload.name, workload.group, workload.about, names)
    console.print(table)
    table = Table("adapter", "version", "reads", "traps", title="Peers of search")
    for name in PEERS:
        peer = make_peer(name)
        try:
            version = peer_version(peer, find_python(peer, envs or default_environments()))
        except PeerError as error:
            version = str(error)
        table.add_row(name, version, peer.io, "; ".join(peer.traps))
    console.print(table)


@bench.command()
@click.argument("names", nargs=-1)
@click.option("--suite", "size", type=click.Choice(["quick", "full"]), default="quick", show_default=True,
              help="Every workload has both sizes.")  # fmt: skip
@click.option("--group", "groups", multiple=True, help="Only workloads of this group.")
@click.option("--peer", "only", multiple=True, help="Only these peers or adapters.")
@click.option("--results", "results_path", type=click.Path(dir_okay=False, path_type=Path),
              default=Path("bench.jsonl"), show_default=True,
              help="Rows of results; what is there already is not run again.")  # fmt: skip
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), default=None,
              help="A folder on the device to be measured, for data and indexes, which are kept; "
                   "~/.cache/memhier/bench by default.")  # fmt: skip
@_environments
@click.option("--data", type=click.Path(file_okay=False, path_type=Path), envvar="MEMHIER_DATA", default=None,
              help="The folder of data sets.")  # fmt: skip
@click.option("--report", "report_path", type=click.Path(dir_okay=False, path_type=Path), help="Write an HTML report.")
def run(
    names: tuple[str, ...], size: str, groups: tuple[str, ...], only: tuple[str, ...], results_path: Path,
    work: Path | None, envs: Path | None, data: Path | None, report_path: Path | None,
) -> None:  # fmt: skip
    """Run the workloads NAMES, or all of them."""
    chosen = _choose(names, groups)
    unknown = set(only) - {name for load in chosen for peer in load.peers for name in (peer.name, peer.adapter)}
    if unknown:
        raise click.ClickException(f"--peer {', '.join(sorted(unknown))}: no workload asked for has it")
    if data is not None:
        use_data_folder(data)
    console = Console(stderr=True)
    try:
        results = Results(results_path)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    environments = envs or default_environments()
    place = work or default_environments().parent / "bench"
    plan = Plan(chosen, "quick" if size == "quick" else "full", place, environments, only)
    with console.status("starting") as status:

        def say(words: str) -> None:
            console.log(words)
            status.update(words)

        try:
            run_plan(plan, results, say)
        except KeyboardInterrupt:
            raise click.ClickException(f"interrupted: the same command goes on where {results_path} stops") from None
    _show(results.rows())
    if report_path is not None:
        report_path.write_text(write_report(results.rows(), _now()))
        console.print(f"Report: {report_path}")


@bench.command()
@click.argument("old", type=_FILE)
@click.argument("new", type=_FILE)
def compare(old: Path, new: Path) -> None:
    """Hold the results NEW against OLD, and flag what changed beyond noise; exits with 1 on a regression."""
    table, regressions = compare_rows(_read(old), _read(new))
    Console().print(table)
    if regressions:
        raise SystemExit(1)


@bench.command()
@click.argument("results", type=_FILE)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("bench.html"), show_default=True)
@click.option("--compare", "against", type=_FILE, help="Older results: changes beyond noise stand in the report.")
def report(results: Path, out: Path, against: Path | None) -> None:
    """Write RESULTS as one HTML file that needs nothing else."""
    out.write_text(write_report(_read(results), _now(), None if against is None else _read(against)))
    Console().print(f"Report: {out}")


@bench.command()
@click.argument("group", type=click.Choice(GROUPS))
@click.option("--peer", "only", multiple=True, type=click.Choice([name for name in PEERS if name != "memhier"]),
              help="Only these peers of search.")  # fmt: skip
@_environments
def install(group: str, only: tuple[str, ...], envs: Path | None) -> None:
    """Install the peers of GROUP: those of search each into an environment of its own, those of scripts into one."""
    if group != "search":
        _install_for_scripts(group, envs or default_environments())
        return
    failed = []
    for name in only or [name for name in PEERS if name != "memhier"]:
        peer = make_peer(name)
        with Console(stderr=True).status(f"installing {peer.package}"):
            try:
                python = install_peer(peer, envs or default_environments())
                Console().print(f"{name}: {peer.package} {peer_version(peer, python)}")
            except PeerError as error:
                failed.append(name)
                Console().print(f"{name}: {error}")
    if failed:
        raise click.ClickException(f"not installed: {', '.join(failed)}")


def _install_for_scripts(group: str, environments: Path) -> None:
    found = [load.parameters.get("install", ()) for load in load_workloads() if load.group == group]
    requirements = list(dict.fromkeys(requirement for some in found for requirement in some))
    if not requirements:
        raise click.ClickException(f"the workloads of {group} ask for no other packages")
    try:
        with Console(stderr=True).status(f"installing {', '.join(requirements)}"):
            python = install_group(group, requirements, environments)
    except PeerError as error:
        raise click.ClickException(str(error)) from error
    Console().print(f"{group}: {', '.join(requirements)} for {python}", highlight=False, soft_wrap=True)


@bench.command()
@click.argument("results", type=_FILE, required=False)
def papers(results: Path | None) -> None:
    """Print each paper's headline beside what RESULTS hold, with the differences of scale."""
    Console().print(papers_table([] if results is None else _read(results)))


def _choose(names: tuple[str, ...], groups: tuple[str, ...]) -> list[Workload]:
    workloads = load_workloads()
    known = {workload.name for workload in workloads}
    for name in names:
        if name not in known:
            raise click.ClickException(f"there is no workload {name!r}: expected one of {', '.join(sorted(known))}")
    for group in groups:
        if group not in {workload.group for workload in workloads}:
            raise click.ClickException(f"--group {group}: no workload is of this group")
    return [
        workload
        for workload in workloads
        if (not names or workload.name in names) and (not groups or workload.group in groups)
    ]


def _read(path: Path) -> list[Row]:
    try:
        return read_rows(path)
    except ValueError as error:
        raise click.ClickException(str(error)) from error


def _show(rows: list[Row]) -> None:
    console = Console(width=max(_WIDTH, Console().width))
    for row in rows:
        if row["kind"] == "script":
            console.rule(row["workload"])
            console.print(row["words"], highlight=False, markup=False)
    for table in tables(rows):
        console.print(table)
    if any(is_loaded(row) for row in rows if row["kind"] == "machine"):
        console.print("Others used this machine meanwhile: trust CPU seconds and reads, not the clock.")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
