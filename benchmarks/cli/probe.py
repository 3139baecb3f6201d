"""``memhier probe``: the speed of the device under a path."""

import os
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from memhier.benchmarks.cli.plain_errors import words_of
from memhier.benchmarks.cli.shell import terminable
from memhier.budget import format_bytes
from memhier.io.device import DeviceProfile
from memhier.io.device import probe as probe_device

__all__ = ["probe"]


@click.command()
@click.argument("path", type=click.Path(exists=True, readable=True))
@click.option("--json", "json_path", metavar="FILE", type=click.Path(dir_okay=False, writable=True, allow_dash=True),
              help="Write the profile as JSON to FILE; '-' prints it in place of the table.")  # fmt: skip
@click.option("--size", default="1GiB", show_default=True, help="Size of the temporary file.")
@click.option("--seconds", type=float, default=8.0, show_default=True, help="Time to spend reading.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the bytes and of the order of reads.")
def probe(path: str, json_path: str | None, size: str, seconds: float, seed: int) -> None:
    """Measure reads per second, bandwidth and latency of the device under PATH at several queue depths.

    PATH is a directory, where the command makes a temporary file of random bytes and removes it again, or an existing
    file, which is only read.
    """
    if json_path not in (None, "-"):
        folder = Path(json_path).absolute().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise click.ClickException(f"--json {json_path}: {folder} is not a directory that can be written to")
    try:
        with terminable(), Console(stderr=True).status(f"Reading scattered pages under {escape(path)} ..."):
            profile = probe_device(path, size=size, seconds=seconds, seed=seed)
    except (OSError, RuntimeError, ValueError) as error:
        raise click.ClickException(words_of(error)) from error
    if json_path == "-":
        click.echo(profile.to_json())
        return
    if json_path is not None:
        Path(json_path).write_text(profile.to_json() + "\n")
    show(profile, Console())


def show(profile: DeviceProfile, console: Console) -> None:
    """Print a profile as a table, with the machine and notes on how far to trust the figures."""
    table = Table(
        title=f"Random {format_bytes(profile.page_bytes)} reads under {escape(profile.path)}", title_justify="left"
    )
    for name in ("depth", "IOPS", "MB/s", "p50 us", "p99 us"):
        table.add_column(name, justify="right")
    for row in profile.depths:
        table.add_row(
            str(row.depth), f"{row.iops:,.0f}", f"{row.mb_per_s:,.1f}",
            f"{row.latency_p50_us:,.0f}", f"{row.latency_p99_us:,.0f}",
        )  # fmt: skip
    console.print(table)
    console.out(f"sequential {profile.sequential_mb_per_s:,.0f} MB/s", highlight=False)
    mode = "direct I/O" if profile.direct else "buffered"
    how = f"{profile.engine}, {mode}, over {format_bytes(profile.span_bytes)} of {profile.file_system}"
    console.out(f"{how} on {profile.device}; {profile.kernel}; {profile.date}", highlight=False)
    for note in profile.notes:
        console.out(f"note: {note}", style="yellow", highlight=False)
