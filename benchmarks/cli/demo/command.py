"""``memhier demo``: its options, and errors in plain words."""

import dataclasses
from pathlib import Path

import click

from memhier.benchmarks.cli.demo.place import Place, default_folder
from memhier.benchmarks.cli.demo.plot import plot_costs
from memhier.benchmarks.cli.demo.report import print_answers, print_next_steps, print_report
from memhier.benchmarks.cli.demo.run import Asked, answer, build, measure, up_to_date
from memhier.benchmarks.cli.demo.stages import Stages
from memhier.benchmarks.cli.demo.text import weigh_query
from memhier.benchmarks.cli.shell import Terminal, json_option, write_json
from memhier.budget import parse_bytes

__all__ = ["demo"]


@click.command()
@click.option("--query", metavar="TEXT", help="Print the ten functions nearest to a few plain words; builds the demo "
              "first if it is missing or packages have changed.")  # fmt: skip
@click.option("--dir", "folder", type=click.Path(path_type=Path), default=None,
              help="Where to build.  [default: memhier-demo in the user's cache directory]")  # fmt: skip
@click.option("--dram", metavar="SIZE", help="DRAM of the open index, such as 8MiB.  [default: a tenth of the vectors]")
@click.option("--limit", type=click.IntRange(min=10), help="Index this many functions at most.  [default: all]")
@click.option("--seed", type=click.IntRange(min=0, max=2**31 - 1), help="Seed of every random choice.  [default: 0]")
@json_option
def demo(
    query: str | None,
    folder: Path | None,
    dram: str | None,
    limit: int | None,
    seed: int | None,
    json_path: str | None,
) -> None:
    """Index every function of this Python installation and search it from SSD.

    The demo reads the standard library and the installed packages, holds out the first sentence of each docstring,
    makes a vector of the rest, and builds an index with a tenth of the vectors' size in DRAM. Half of the sentences
    tune the index; the others then search for their own functions. The demo takes a minute or two. It downloads nothing
    and runs none of the code that it reads.
    """
    asked = Asked(seed, limit, None if dram is None else parse_bytes(dram, "--dram"))
    place = Place(folder or default_folder())
    if query is None:
        _run(place, asked, json_path)
    else:
        _ask(place, asked, query, json_path)


def _run(place: Place, asked: Asked, json_path: str | None) -> None:
    stages = Stages()
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
    if write_json(dataclasses.asdict(report), json_path):
        return
    terminal = Terminal()
    print_report(terminal, report)
    terminal.print(drawn)
    print_next_steps(terminal, report)


def _ask(place: Place, asked: Asked, query: str, json_path: str | None) -> None:
    if not weigh_query(query):
        raise ValueError(f"--query {query!r} holds no word: say what the function does, as in 'parse a date from text'")
    if not up_to_date(place, asked):
        click.echo(f"No demo of these packages yet: building in {place.folder}", err=True)
        with place.locked():
            build(place, asked, Stages())
    with place.locked(shared=True):
        answers = answer(place, query)
    rows = [{**found.function._asdict(), "distance": found.distance} for found in answers]
    if not write_json(rows, json_path):
        print_answers(Terminal(), query, answers)
