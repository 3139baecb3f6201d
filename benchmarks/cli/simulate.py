"""``memhier simulate``: the DRAM that a trace of accesses needs under each policy."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from rich.table import Table

from memhier.benchmarks.cli.curve_plot import draw_curves, save_curves
from memhier.benchmarks.cli.shell import (
    FiniteRange,
    NameList,
    Terminal,
    in_a_folder,
    json_option,
    new_table,
    working,
    write_json,
)
from memhier.benchmarks.cli.traces import TRACE_FORMATS, read_trace
from memhier.budget import format_bytes, parse_bytes
from memhier.io.device import DeviceProfile
from memhier.io.outside import reading
from memhier.planning.cost import CostModel
from memhier.planning.curves import CURVE_POLICIES, MissRatioCurve, miss_ratio_curve
from memhier.planning.simulation import SIMULATED_POLICIES, Simulation
from memhier.planning.simulation import simulate as run

__all__ = ["simulate"]

_CURVE_POINTS = 24


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False))
@click.option("--dram", required=True, help="DRAM for rows, such as 64MiB.")
@click.option("--policy", "policies", type=NameList(SIMULATED_POLICIES), default="belady,lru", show_default=True,
              help="One or several, with commas between them.")  # fmt: skip
@click.option("--row-bytes", type=click.IntRange(1), default=256, show_default=True, help="Bytes of one row.")
@click.option(
    "--batch",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Accesses that need their rows at the same time.",
)
@click.option("--lookahead", type=click.IntRange(0), help="Batches that Belady knows ahead; all by default.")
@click.option("--dirty", is_flag=True, help="Accesses change rows, so evicted rows are written.")
@click.option("--device", help=f"{', '.join(CostModel.CLASSES)}, or a file that memhier probe --json wrote.")
@click.option("--compute-ms", type=FiniteRange(0), default=0.0, show_default=True, help="Computing time of each batch.")
@click.option(
    "--format", "trace_format", type=click.Choice(sorted(TRACE_FORMATS)), help="Format of TRACE; guessed by default."
)
@click.option("--sample", type=float, help="Draw the curve from this share of the keys, with its error.")
@json_option
@click.option(
    "--png", type=click.Path(dir_okay=False, writable=True), callback=in_a_folder, help="Save the curve as a picture."
)
def simulate(
    trace: str,
    dram: str,
    policies: list[str],
    row_bytes: int,
    batch: int,
    lookahead: int | None,
    dirty: bool,
    device: str | None,
    compute_ms: float,
    trace_format: str | None,
    sample: float | None,
    json_path: str | None,
    png: str | None,
) -> None:
    """Run a trace of key accesses through caches of the size of --dram, and draw misses against DRAM.

    TRACE is a file of keys: one on each line, .npy, or a published format (see --format); it may end in .xz or .gz.
    """
    dram_bytes = parse_bytes(dram, "--dram")
    model = None if device is None else CostModel.of(_device(device))
    with working(f"Reading {trace} ..."):
        keys = read_trace(trace, trace_format)
    if not len(keys):
        raise click.ClickException(f"{trace}: the trace holds no accesses")
    results = []
    for name in policies:
        with working(f"Running {len(keys):,} accesses under {name} ..."):
            results.append(run(
                keys, dram=dram_bytes, row_bytes=row_bytes, policy=name, batch=batch, dirty=dirty, device=model,
                lookahead=lookahead if name == "belady" else None, compute_s=compute_ms / 1e3,
            ))  # fmt: skip
    with working("Drawing the curve ..."):
        curves = _curves(keys, results[0].capacity, policies, sample)
    if png is not None:
        save_curves(curves, row_bytes, dram_bytes, png)
    if write_json(_record(trace, keys, row_bytes, dram, results, curves), json_path):
        return
    terminal, first = Terminal(), results[0]
    terminal.print(
        f"{first.accesses:,} accesses to {len(np.unique(keys)):,} rows; {dram} of DRAM hold {first.capacity:,} "
        f"rows of {format_bytes(row_bytes)}"
    )
    terminal.print(_table(results))
    if curves:
        terminal.print(_drawn(draw_curves(curves, row_bytes, dram_bytes), terminal.encoding))
        terminal.print(_words(curves, sample))


def _drawn(picture: str, encoding: str) -> str:
    """Return a picture in the letters that a terminal has."""
    return picture if encoding.startswith("utf") else picture.translate(str.maketrans("│└─┊", "|+-:"))


def _device(device: str) -> str:
    """Return a class's name as it is, and a profile's file as its text."""
    if device in CostModel.CLASSES or not Path(device).is_file():
        return device
    with reading(device):
        text = Path(device).read_text()
        DeviceProfile.from_json(text)
    return text


def _curves(
    keys: npt.NDArray[np.int64], capacity: int, policies: list[str], sample: float | None
) -> list[MissRatioCurve]:
    largest = max(capacity, len(np.unique(keys)))
    sizes = np.unique(np.rint(np.append(np.geomspace(1, largest, _CURVE_POINTS), capacity)).astype(np.int64))
    # A sample does not give the curve of LFU.
    drawn = [name for name in policies if name in CURVE_POLICIES and not (name == "lfu" and sample is not None)]
    return [miss_ratio_curve(keys, sizes, policy=name, rate=sample) for name in drawn]


def _table(results: list[Simulation]) -> Table:
    titles = ["hits", "reads", "writes", "pages"]
    if results[0].forecast is not None:
        titles += ["I/O s", "stall s", "hidden"]
    table = new_table(("policy", "left"), *((title, "right") for title in titles))
    for result in results:
        cells = [
            result.policy, f"{result.hit_ratio:.2%}", f"{result.reads:,}", f"{result.writes:,}", f"{result.pages:,}"
        ]  # fmt: skip
        if result.forecast is not None:
            forecast = result.forecast
            cells += [f"{forecast.io_s:,.2f}", f"{forecast.stall_s:,.2f}", f"{forecast.hidden:.0%}"]
        table.add_row(*cells)
    return table


def _words(curves: list[MissRatioCurve], sample: float | None) -> str:
    words = "Misses per access against DRAM, each access on its own."
    if sample is not None:
        error = np.nanmax([np.nanmax(curve.error) for curve in curves if not np.isnan(curve.error).all()], initial=0.0)
        words += (
            f" From {curves[0].sampled:,} of {curves[0].accesses:,} accesses (a sample of {sample:.2%} of the keys): "
            f"within {error:.3f} with 95 % confidence if the sample can tell."
        )
    return words


def _record(
    trace: str,
    keys: npt.NDArray[np.int64],
    row_bytes: int,
    dram: str,
    results: list[Simulation],
    curves: list[MissRatioCurve],
) -> dict[str, Any]:
    return {
        "trace": trace,
        "accesses": len(keys),
        "distinct": len(np.unique(keys)),
        "dram_bytes": parse_bytes(dram),
        "row_bytes": row_bytes,
        "results": [
            asdict(result) | {"hit_ratio": result.hit_ratio} | ({} if result.forecast is None else {
                "forecast": asdict(result.forecast) | {"hidden": result.forecast.hidden}
            })
            for result in results
        ],
        "curves": [
            {
                "policy": curve.policy,
                "capacities": curve.capacities.tolist(),
                "miss_ratio": curve.miss_ratio.tolist(),
                # JSON has no NaN: null if the sample cannot tell.
                "error": [None if np.isnan(error) else error for error in curve.error.tolist()],
                "sampled": curve.sampled,
                "rate": curve.rate,
            }
            for curve in curves
        ],
    }  # fmt: skip
