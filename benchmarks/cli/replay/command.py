"""``memhier replay``: inspects, checks and exports a replay buffer from the shell, and tests its disk.

All commands read the last checkpoint, also while a training uses the buffer.
"""

from pathlib import Path

import click
import numpy as np
from tqdm import tqdm

from memhier.arguments import counted
from memhier.benchmarks.cli.replay.doctor import examine
from memhier.benchmarks.cli.shell import FiniteRange, json_option, report, working
from memhier.recsys.replay.stored import StoredSamples

__all__ = ["replay"]

_BLOCK = 1024


@click.group()
def replay() -> None:
    """Inspect, check and export a replay buffer, and test whether its disk keeps up with training.

    The exit code is 2 for bad arguments and 1 for any other failure. The commands info and doctor take --json.
    """


@replay.command()
@click.argument("path", type=click.Path(exists=True, file_okay=False))
@json_option
def info(path: str, json_path: str | None) -> None:
    """Print the contents of the last checkpoint of a buffer."""
    with StoredSamples(path) as stored:
        meta, labels = stored.meta, stored.labels
        figures = {
            "samples": len(stored),
            "arrivals": meta["tiers"]["arrivals"],
            "limit": meta["tiers"]["limit"],
            "in_memory": len(stored.in_memory),
            "slots": meta["slots"],
            "step": meta["step"],
            "classes": len(np.unique(labels[labels >= 0])),
            "admission": meta["admit"],
            "swaps": "none" if meta["swap"] is None else " ".join(map(str, meta["swap"])),
            "delay": meta["delay"],
            "seed": meta["seed"],
            "storage_bytes": stored.storage_bytes,
            "fields": repr(stored.schema),
            "codecs": ", ".join(f"{name}: {codec}" for name, codec in meta["codecs"].items()) or "none",
        }
    report(f"replay buffer {path}", figures, json_path, ("samples", "in_memory"))


@replay.command()
@click.argument("path", type=click.Path(exists=True, file_okay=False))
@click.pass_context
def check(context: click.Context, path: str) -> None:
    """Read the whole buffer at PATH and print every error.

    The exit code is 1 if there is any.
    """
    with StoredSamples(path) as stored:
        findings = [finding for finding in stored.check() if not finding.harmless]
        if not findings:
            for _ in tqdm(stored.blocks(_BLOCK), total=-(-len(stored) // _BLOCK), unit="block", leave=False):
                continue
    for finding in findings:
        click.echo(str(finding))
    if findings:
        context.exit(1)
    click.echo(f"{path}: {counted(len(stored.ids), 'sample')}, nothing wrong")


@replay.command()
@click.argument("path", type=click.Path(exists=True, file_okay=False))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--memory", is_flag=True, help="Only the samples in memory.")
def export(path: str, out: Path, memory: bool) -> None:
    """Write the samples of the buffer at PATH to .npy files.

    The new folder OUT holds one file for each field. Labels and ids lie beside them, as buffer.labels and buffer.ids if
    a field has that name.
    """
    with StoredSamples(path) as stored:
        positions = np.sort(stored.in_memory) if memory else np.arange(len(stored))
        out.mkdir()
        columns = {name: (column.dtype, column.shape) for name, column in stored.schema.columns.items()}
        # No name of a field has a dot.
        labels, ids = (f"buffer.{name}" if name in columns else name for name in ("labels", "ids"))
        columns |= {labels: (np.dtype(np.int64), ()), ids: (np.dtype(np.int64), ())}
        files = {
            name: np.lib.format.open_memmap(out / f"{name}.npy", "w+", dtype, (len(positions), *shape))
            for name, (dtype, shape) in columns.items()
        }  # fmt: skip
        for start in tqdm(range(0, len(positions), _BLOCK), unit="block", leave=False):
            batch = stored.read(positions[start : start + _BLOCK])
            everything = batch.data | {labels: batch.labels, ids: batch.ids}
            for name, file in files.items():
                file[start : start + len(batch)] = everything[name]
        for file in files.values():
            file.flush()
    click.echo(f"{out}: {counted(len(positions), 'sample')}")


@replay.command()
@click.argument("path", type=click.Path(exists=True, file_okay=False))
@click.option("--batch", type=click.IntRange(1), default=32, show_default=True, help="Samples replayed in a step.")
@click.option("--ratio", type=FiniteRange(0, 1), default=0.5, show_default=True, help="Share of these to swap.")
@click.option("--step-ms", type=FiniteRange(0, min_open=True), required=True, help="Time of a training step.")
@click.option("--seconds", type=FiniteRange(0.1), default=5.0, show_default=True, help="How long to measure.")
@click.option("--sample-bytes", type=click.IntRange(1), help="Size of a sample, if PATH is a folder without a buffer.")
@json_option
def doctor(
    path: str, batch: int, ratio: float, step_ms: float, seconds: float, sample_bytes: int | None, json_path: str | None
) -> None:
    """Test whether the disk under PATH keeps up with swaps.

    PATH is a buffer, or a folder for one. A step swaps BATCH times RATIO samples. The command repeats the reads of a
    step past the page cache, and decodes the samples. A step waits if its reads take longer than the computing of the
    step before it.
    """
    with working(f"Reading from {path} ..."):
        figures = examine(Path(path), batch, ratio, step_ms / 1e3, seconds, sample_bytes)
    report(f"swaps from {path}", figures, json_path, ("waits", "sustained_ratio"))
