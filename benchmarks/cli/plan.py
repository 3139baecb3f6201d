"""``memhier plan``: the machines that an index, tables or a replay buffer need, before any are bought."""

from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import click
import numpy as np

from memhier.benchmarks.cli.shell import FiniteRange, Terminal, json_option, print_figures, working, write_json
from memhier.benchmarks.cli.traces import read_trace
from memhier.io.device import DeviceProfile
from memhier.io.outside import reading
from memhier.planning.node import Node

__all__ = ["plan"]

_NODE = "16 cores, 64 GiB, 2x NVMe 800k IOPS"
_MADE = 40_000  # vectors of a made sample
_KINDS = ("vectors", "rows", "samples")
# The options of each kind; all others but those of every kind are refused beside it.
_OPTIONS = {
    "vectors": {"dim", "dtype", "recall", "qps", "k", "metric", "p99_ms", "sample", "queries", "sample_rows"},
    "rows": {"row_bytes", "batch", "zipf", "step_ms", "sample"},
    "samples": {"sample_bytes", "batch", "add_rate", "step_ms", "ratio"},
}
_COMMON = {"node", "device", "cpu_factor", "price_node_hour", "seed", "json_path"}


class Count(click.ParamType[int]):
    """A whole number, also as 1e9."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            number = float(str(value).replace("_", "").replace(",", ""))
            whole = int(number)
        except (ValueError, OverflowError):
            whole, number = 0, 0.5
        if whole != number or whole < 1:
            self.fail(f"{value!r}: expected a whole number from 1 up, such as 250000 or 1e9", param, ctx)
        return whole


@click.command()
@click.option("--vectors", type=Count(), help="Plan an index of so many vectors.")
@click.option("--rows", type=Count(), help="Plan embedding tables of so many rows in training.")
@click.option("--samples", type=Count(), help="Plan a replay buffer of so many samples.")
@click.option("--node", default=_NODE, show_default=True, help="One machine. An NVMe may also have its size and the "
              "time of a read: 'NVMe 800k IOPS 3.84 TB 80 us'.")  # fmt: skip
@click.option("--device", type=click.Path(exists=True, dir_okay=False),
              help="The machine's drive, as memhier probe --json wrote it, in place of that of --node.")  # fmt: skip
@click.option("--sample", type=click.Path(exists=True, dir_okay=False),
              help="A file of your own: vectors for --vectors, ids in the order of training for --rows.")  # fmt: skip
@click.option("--dim", type=click.IntRange(1), help="[vectors] Dimension; that of --sample by default.")
@click.option("--dtype", type=click.Choice(["float32", "float16", "int8", "uint8"]),
              help="[vectors] Element type; that of --sample, or float32, by default.")  # fmt: skip
@click.option("--recall", type=FiniteRange(0, 1, min_open=True, max_open=True), default=0.95, show_default=True,
              help="[vectors] Declared recall.")  # fmt: skip
@click.option("--qps", type=FiniteRange(0, min_open=True), default=1000.0, show_default=True,
              help="[vectors] Queries per second.")  # fmt: skip
@click.option("--k", type=click.IntRange(1), default=10, show_default=True, help="[vectors] Neighbours of a query.")
@click.option("--metric", type=click.Choice(["l2", "ip", "cosine"]), default="l2", show_default=True,
              help="[vectors] Distance.")  # fmt: skip
@click.option("--p99-ms", type=FiniteRange(0, min_open=True),
              help="[vectors] Latency that 99 % of queries keep.")  # fmt: skip
@click.option("--queries", type=click.Path(exists=True, dir_okay=False),
              help="[vectors] A file of your own queries; vectors of the sample by default.")  # fmt: skip
@click.option("--sample-rows", type=click.IntRange(2048), default=32768, show_default=True,
              help="[vectors] Vectors of the sample to measure with.")  # fmt: skip
@click.option("--row-bytes", type=click.IntRange(1), default=512, show_default=True,
              help="[rows] Bytes of a row with the optimizer's state.")  # fmt: skip
@click.option("--batch", type=Count(), default=65536, show_default=True,
              help="[rows, samples] Rows looked up, or samples drawn, in a step on all machines.")  # fmt: skip
@click.option("--zipf", type=FiniteRange(0, 3), default=1.05, show_default=True,
              help="[rows] Exponent of the accesses, where no --sample tells it.")  # fmt: skip
@click.option("--step-ms", type=FiniteRange(0, min_open=True),
              help="[rows, samples] Computing time of a step, behind which reads are to hide.")  # fmt: skip
@click.option("--sample-bytes", type=click.IntRange(1), default=3072, show_default=True,
              help="[samples] Bytes of a sample.")  # fmt: skip
@click.option("--add-rate", type=FiniteRange(0), default=0.0, help="[samples] Samples a second that arrive.")
@click.option("--ratio", type=FiniteRange(0, 1), default=0.5, show_default=True,
              help="[samples] Share of the used samples that are swapped.")  # fmt: skip
@click.option("--cpu-factor", type=FiniteRange(0, min_open=True), default=1.0, show_default=True,
              help="Processor time of the machine's cores, in times of this machine's.")  # fmt: skip
@click.option("--price-node-hour", type=FiniteRange(0), help="Price of a machine for an hour.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of samples and simulations.")
@json_option
@click.pass_context
def plan(ctx: click.Context, /, **options: Any) -> None:
    """Say how many machines a workload needs, and the figures that they will show; then every assumption.

    Give one of --vectors, --rows and --samples.
    """
    chosen = [kind for kind in _KINDS if options[kind] is not None]
    if len(chosen) != 1:
        raise click.UsageError("expected one of --vectors, --rows and --samples")
    kind = chosen[0]
    given = {name for name in options if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE}
    if unfit := sorted(given - _OPTIONS[kind] - _COMMON - {kind}):
        raise click.UsageError(f"--{unfit[0].replace('_', '-')} does not go with --{kind}")
    node = _node(options["node"], options["device"])
    title, figures, found = _MAKERS[kind](node, options)
    if options["price_node_hour"] is not None:
        figures["price_an_hour"] = found.nodes * options["price_node_hour"]
        if kind == "vectors":
            figures["cost_per_million_queries"] = found.cost_per_million(options["price_node_hour"])
    record = {"workload": asdict(found.workload), "node": asdict(node), "figures": figures,
              "assumptions": found.assumptions}  # fmt: skip
    if write_json(record, options["json_path"]):
        return
    terminal = Terminal()
    terminal.print(title)
    print_figures(terminal, figures, ("nodes",))
    terminal.print("Assumptions:")
    for sentence in found.assumptions:
        terminal.print(f"- {sentence}")


def _node(text: str, device: str | None) -> Node:
    node = Node.parse(text)
    if device is None:
        return node
    with reading(device):
        profile = DeviceProfile.from_json(Path(device).read_text())
    return Node.of_probe(profile, node.cores, node.dram)


def _plan_vectors(node: Node, options: dict[str, Any]) -> tuple[str, dict[str, Any], Any]:
    from memhier.ann.plan import SearchWorkload, plan_index

    names = [field.name for field in fields(SearchWorkload)]
    workload = SearchWorkload(**{name: options[name] for name in names})
    sample, note = _vector_sample(options)
    with working("Building and searching small indexes of the sample ..."):
        found = plan_index(
            sample, workload, node, queries=options["queries"], sample_rows=options["sample_rows"],
            cpu_factor=options["cpu_factor"], seed=options["seed"],
        )  # fmt: skip
    names = [
        "nodes", "shards", "replicas", "vectors_per_shard", "dram_bytes", "code_bytes", "lists", "disk_bytes",
        "build_disk_bytes", "build_hours", "probes", "scanned", "candidates", "reads", "cpu_ms", "p50_ms", "p99_ms",
        "cores", "drives", "searches", "limit", "qps_most",
    ]  # fmt: skip
    figures = {name: getattr(found, name) for name in names}
    for name, (low, high) in found.ranges.items():
        figures[f"{name}_within"] = f"{low:,.1f} to {high:,.1f}"
    title = f"{workload.vectors:,} vectors at recall {workload.recall:g}, {workload.qps:,.0f} queries a second{note}"
    return title, figures, found


def _vector_sample(options: dict[str, Any]) -> tuple[object, str]:
    """Return vectors to measure with, and a note where they are made."""
    if options["sample"] is None:
        if options["dim"] is None:
            raise click.UsageError("expected --dim, or --sample with vectors of your own")
        from memhier.benchmarks.generators import mixed

        made = next(mixed(max(_MADE, options["vectors"]), options["dim"], options["seed"]).blocks(_MADE))
        note = "\nNo --sample: made vectors stand in for yours, and yours may need much more or less."
        dtype = options["dtype"] or "float32"
        if np.dtype(dtype).kind in "iu":  # spread over the range of the type
            low, span, info = made.min(), np.ptp(made), np.iinfo(dtype)
            return np.rint(info.min + (made - low) / span * (info.max - info.min)).astype(dtype), note
        return made.astype(dtype), note
    from memhier.ann.files import open_vectors

    with open_vectors(options["sample"]) as there:
        dimension, dtype = there.dimension, np.dtype(there.dtype).name
    for name, mine in (("dim", dimension), ("dtype", dtype)):
        if options[name] not in (None, mine):
            raise click.UsageError(f"--{name} {options[name]}: {options['sample']} has {mine}")
    return options["sample"], ""


def _plan_rows(node: Node, options: dict[str, Any]) -> tuple[str, dict[str, Any], Any]:
    from memhier.recsys.plan import TableWorkload, plan_tables

    workload = TableWorkload(
        options["rows"], options["row_bytes"], options["batch"], options["zipf"], options["step_ms"]
    )
    ids = None if options["sample"] is None else read_trace(options["sample"], None)
    found = plan_tables(workload, node, sample=ids)
    title = f"{workload.rows:,} rows of {workload.row_bytes} bytes, {workload.batch:,} look-ups a step"
    return title, _figures(found), found


def _plan_samples(node: Node, options: dict[str, Any]) -> tuple[str, dict[str, Any], Any]:
    from memhier.recsys.plan import ReplayWorkload, plan_replay

    workload = ReplayWorkload(**{field.name: options[field.name] for field in fields(ReplayWorkload)})
    found = plan_replay(workload, node)
    title = f"{workload.samples:,} samples of {workload.sample_bytes} bytes, {workload.batch:,} a step"
    return title, _figures(found), found


def _figures(found: Any) -> dict[str, Any]:
    asked = {"workload", "node", "assumptions"}
    return {field.name: getattr(found, field.name) for field in fields(found) if field.name not in asked}


_MAKERS: dict[str, Callable[[Node, dict[str, Any]], tuple[str, dict[str, Any], Any]]] = {
    "vectors": _plan_vectors, "rows": _plan_rows, "samples": _plan_samples,
}  # fmt: skip
