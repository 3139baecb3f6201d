"""``memhier demo``: its options, and errors in plain words."""

import dataclasses
import json
import os
from pathlib import Path

import click
from rich.console import Console

from memhier.benchmarks.cli.demo.place import Place, default_folder
from memhier.benchmarks.cli.demo.plot import plot_costs
from memhier.benchmarks.cli.demo.report import print_answers, print_next_steps, print_report
from memhier.benchmarks.cli.demo.run import Asked, answer, build, measure, up_to_date
from memhier.benchmarks.cli.demo.stages import Stages
from memhier.benchmarks.cli.demo.text import weigh_query
from memhier.benchmarks.cli.plain_errors import words_of
from memhier.benchmarks.cli.shell import terminable
from memhier.budget import parse_bytes
from memhier.errors import MemhierError

__all__ = ["demo"]


@click.command()
@click.option("--query", metavar="TEXT", help="Print the ten functions nearest to a few plain words; builds the demo "
              "first if it is missing or packages have changed.")  # fmt: skip
@click.option("--dir", "folder", type=click.Path(path_type=Path), default=None,
              help="Where to build.  [default: memhier-demo in the user's cache directory]")  # fmt: skip
@click.option("--dram", metavar="SIZE", help="DRAM of the open index, such as 8MiB.  [default: a tenth of the vectors]")
@click.option("--limit", type=click.IntRange(min=10), help="Index this many functions at most.  [default: all]")
@click.option("--seed", type=click.IntRange(min=0, max=2**31 - 1), help="Seed of every random choice.  [default: 0]")
@click.option("--json", "json_path", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
              help="Also write all figures, or the answers to the query, to FILE as JSON.")  # fmt: skip
def demo(
    query: str | None,
    folder: Path | None,
    dram: str | None,
    limit: int | None,
    seed: int | None,
    json_path: Path | None,
) -> None:
    """Index every function of this Python installation and search it from SSD.

    The demo reads the standard library and the installed packages, holds out the first sentence of each docstring,
    makes a vector of the rest, and builds an index with a tenth of the vectors' size in DRAM. Half of the sentences
    tune the index; the others then search for their own functions. The demo takes a minute or two. It downloads nothing
    and runs none of the code that it reads.
    """
    try:
        if json_path is not None:
            _check_writable(json_path)
        asked = Asked(seed, limit, None if dram is None else parse_bytes(dram, "--dram"))
        place = Place(folder or default_folder())
        with terminable():
            if query is None:
                _run(place, asked, json_path)
            else:
                _ask(place, asked, query, json_path)
    except (MemhierError, OSError, ValueError) as error:
        raise click.ClickException(words_of(error)) from error


def _run(place: Place, asked: Asked, json_path: Path | None) -> None:
    console, stages = Console(), Stages()
    click.echo(f"Building in {place.folder}", err=True)
    with place.locked():
        facts = build(place, asked, stages)
        report = measure(place, facts, asked, stages)
        picture = place.current / "recall_reads.png"
        try:
            with stages.run("Draw the picture"):
                plot_costs(picture, {"as built": report.as_built, "tuned": report.tuned})
            drawn = f"recall against page reads: {picture}"
        except ImportError as error:
            drawn = f"no picture of recall against page reads: {error}"
    print_report(console, report)
    console.out(drawn, highlight=False)
    print_next_steps(console, report)
    if json_path is not None:
        json_path.write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")


def _ask(place: Place, asked: Asked, query: str, json_path: Path | None) -> None:
    if not weigh_query(query):
        raise ValueError(f"--query {query!r} holds no word: say what the function does, as in 'parse a date from text'")
    if not up_to_date(place, asked):
        click.echo(f"No demo of these packages yet: building in {place.folder}", err=True)
        with place.locked():
            build(place, asked, Stages())
    with place.locked(shared=True):
        answers = answer(place, query)
    print_answers(Console(), query, answers)
    if json_path is not None:
        json_path.write_text(
            json.dumps([{**found.function._asdict(), "distance": found.distance} for found in answers], indent=2) + "\n"
        )


def _check_writable(path: Path) -> None:
    """Refuse a file that cannot be written before minutes of work, not after."""
    parent = path.absolute().parent
    if not parent.is_dir() or not os.access(path if path.exists() else parent, os.W_OK):
        raise ValueError(f"--json {path}: cannot be written; name a file in a directory that exists and is writable")
