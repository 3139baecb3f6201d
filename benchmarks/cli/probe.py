"""``memhier probe``: the speed of the device under a path."""

import json

import click

from memhier.benchmarks.cli.shell import Terminal, json_option, new_table, working, write_json
from memhier.budget import format_bytes
from memhier.io.device import DeviceProfile
from memhier.io.device import probe as probe_device

__all__ = ["probe"]


@click.command()
@click.argument("path", type=click.Path(exists=True, readable=True))
@json_option
@click.option("--size", default="1GiB", show_default=True, help="Size of the temporary file.")
@click.option("--seconds", type=float, default=8.0, show_default=True, help="Time to spend reading.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the bytes and of the order of reads.")
def probe(path: str, json_path: str | None, size: str, seconds: float, seed: int) -> None:
    """Measure reads per second, bandwidth and latency of the device under PATH at several queue depths.

    PATH is a directory, where the command makes a temporary file of random bytes and removes it again, or an existing
    file, which is only read.
    """
    with working(f"Reading scattered pages under {path} ..."):
        profile = probe_device(path, size=size, seconds=seconds, seed=seed)
    if not write_json(json.loads(profile.to_json()), json_path):
        show(profile, Terminal())


def show(profile: DeviceProfile, terminal: Terminal) -> None:
    """Print a profile as a table, with the machine and notes on how far to trust the figures."""
    terminal.print(f"Random {format_bytes(profile.page_bytes)} reads under {profile.path}")
    table = new_table(*((name, "right") for name in ("depth", "IOPS", "MB/s", "p50 us", "p99 us")))
    for row in profile.depths:
        table.add_row(
            str(row.depth), f"{row.iops:,.0f}", f"{row.mb_per_s:,.1f}",
            f"{row.latency_p50_us:,.0f}", f"{row.latency_p99_us:,.0f}",
        )  # fmt: skip
    terminal.print(table)
    terminal.print(f"sequential {profile.sequential_mb_per_s:,.0f} MB/s")
    mode = "direct I/O" if profile.direct else "buffered"
    how = f"{profile.engine}, {mode}, over {format_bytes(profile.span_bytes)} of {profile.file_system}"
    terminal.print(f"{how} on {profile.device}; {profile.kernel}; {profile.date}")
    for note in profile.notes:
        terminal.print(f"note: {note}", style="yellow")
