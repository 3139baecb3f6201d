"""``memhier doctor``: does this machine run memhier, and how well?"""

from pathlib import Path

import click

from memhier.benchmarks.cli.doctor.checks import examine
from memhier.benchmarks.cli.shell import FiniteRange, Terminal, json_option, new_table, working, write_json

__all__ = ["doctor"]


@click.command()
@click.argument("path", type=click.Path(exists=True, readable=True, path_type=Path), default=".")
@click.option("--seconds", type=FiniteRange(0, 60), default=1.0, show_default=True,
              help="Time to measure the device; 0 leaves it out.")  # fmt: skip
@json_option
def doctor(path: Path, seconds: float, json_path: str | None) -> None:
    """Check the installation, this machine, and the place of the data.

    PATH is a folder for data, the current one by default: the command writes a temporary file and a store there, and
    removes them. Of an existing file it only reads. It prints versions, the compiled core, the engine of reads and why
    others cannot be had, limits, direct I/O and a brief profile of the device. The exit code is 1 if something is
    broken; a note is no fault.
    """
    with working("Checking ..."):
        findings = [*examine(path, seconds)]
    broken = [finding for finding in findings if finding.state == "bad"]
    if not write_json({"broken": len(broken), "findings": [finding.to_dict() for finding in findings]}, json_path):
        table = new_table(("", "left"), ("", "left"), ("", "left"), header=False)
        for finding in findings:
            table.add_row(finding.name, "" if finding.state == "good" else finding.state, finding.words)
        Terminal().print(table)
    if broken:
        raise click.ClickException(f"broken: {', '.join(finding.name for finding in broken)}")
