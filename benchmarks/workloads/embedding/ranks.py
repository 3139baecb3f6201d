"""A step of a DLRM over 1, 2 and 4 ranks of this machine, whose ranks read for themselves or have a reader.

``python -m memhier.benchmarks.workloads.embedding.ranks --dir /path/on/the/device``: Criteo's table sizes and skew,
rows of 32 floats with Adagrad's state, the dense part under DDP. All ranks together train on the same batches, one
thread each, so a way with more processes than cores cannot be faster for them: the processor time of a step, over all
trainers, shows the cost of more ranks on any machine. A reader is one more process. With ``--own-core`` all threads of
a rank share one core: without it one rank reads ahead on another one, which a second rank would need.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.workloads.embedding.common import Sample, samples, table_configs, table_sizes
from memhier.benchmarks.workloads.embedding.models.dlrm import DLRM
from memhier.benchmarks.workloads.harness import Outcome, workload
from memhier.policies import Belady
from memhier.recsys import Adagrad, ShardedEmbeddingBagCollection, SharedLoader, lookahead, split_samples

__all__ = ["main"]

DIM = 32
WARM = 8


@dataclass(frozen=True, slots=True)
class _Way:
    ranks: int
    reads: bool
    scale: float
    share: float
    batch: int
    steps: int
    own_core: bool = False

    @property
    def name(self) -> str:
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}{' and a reader' * self.reads}"


def _own(way: _Way, rank: int) -> Iterator[Sample]:
    for whole in _stream(way):
        yield split_samples(whole, way.ranks)[rank]


def _stream(way: _Way) -> Iterator[Sample]:
    return samples(table_sizes(way.scale), way.batch, WARM + way.steps, 0)


def _work(rank: int, folder: str, way: _Way) -> None:
    torch.set_num_threads(1)
    if way.own_core:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    world = way.ranks + way.reads
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    shared = SharedLoader(reader=way.ranks) if way.reads else None
    configs = table_configs(table_sizes(way.scale), DIM)
    if shared is not None and shared.is_reader:
        found: dict[str, Any] = shared.serve([*_stream(way)], configs, ids=lambda sample: sample.ids)
    else:
        found = _train(rank, folder, way, shared, configs)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    if shared is not None:
        shared.close()
    dist.destroy_process_group()


def _train(rank: int, folder: str, way: _Way, shared: SharedLoader | None, configs: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    group = None if shared is None else shared.trainers
    net = nn.parallel.DistributedDataParallel(DLRM(len(configs), DIM), process_group=group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    policy = Belady(max(way.batch * 30, int(way.share * sum(table_sizes(way.scale)))) // way.ranks)
    steps, losses, busy = list[float](), list[float](), 0.0
    with ShardedEmbeddingBagCollection(
        configs, optimizer=Adagrad(lr=0.01), dram="16GiB", path=Path(folder, "t"), policy=policy, group=group
    ) as tables:
        ahead = (
            lookahead([*_own(way, rank)], tables, ids=lambda sample: sample.ids, window=8)
            if shared is None
            else lookahead(shared, tables, ids=shared.plan, window=8)
        )
        started = time.perf_counter()
        for number, sample in enumerate(ahead, 1):
            logits = net(sample.dense, tables(sample.ids).values())
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(logits, sample.labels)
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            steps.append(time.perf_counter() - started)
            started = time.perf_counter()
            if number == WARM:
                busy = time.process_time()
        busy = time.process_time() - busy
        return {"steps": steps[WARM:], "losses": losses, "busy": busy, "wait_s": ahead.stats()["wait_s"]}


def _run(scratch: Path, way: _Way) -> dict[str, Any]:
    """Return the measurements of all ranks of a way, and the reader's."""
    folder = scratch / way.name.replace(" ", "-")
    folder.mkdir()
    spawn(_work, (str(folder), way), nprocs=way.ranks + way.reads)  # type: ignore[no-untyped-call]
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(way.ranks)]
    reader = json.loads((folder / f"{way.ranks}.json").read_text()) if way.reads else None
    return {"way": asdict(way), "name": way.name, "ranks": ranks, "reader": reader}


def record(found: list[dict[str, Any]], cores: int) -> Record:
    """Return step times, samples a second, processor time and losses."""
    figures = [Figure.of("cores", cores, "cores", "neither")]
    alone = _rate(found[0])
    for each in found:
        name, ranks = each["name"], each["ranks"]
        steps = ranks[0]["steps"]
        busy = 1e3 * sum(rank["busy"] for rank in ranks) / len(steps)
        waits = 1e3 * ranks[0]["wait_s"] / len(ranks[0]["losses"])
        loss = float(np.mean([rank["losses"][-len(steps) // 4 :] for rank in ranks]))
        figures += [
            Figure.of(f"{name}: step", [1e3 * one for one in steps], "ms", "less", clock=True),
            Figure.of(f"{name}: 99th percentile", float(np.percentile(steps, 99) * 1e3), "ms", "less", clock=True),
            Figure.of(f"{name}: samples", _rate(each), "samples/s", "more", clock=True),
            Figure.of(f"{name}: samples over 1 rank", _rate(each) / alone, "times", "more", clock=True),
            Figure.of(f"{name}: processor time of trainers", busy, "ms a step", "less"),
            Figure.of(f"{name}: wait for batches", waits, "ms a step", "less", clock=True),
            Figure.of(f"{name}: loss", loss, "nats", "less"),
        ]
        if each["reader"] is not None:
            for key, words in (("plan_s", "divide and plan"), ("send_s", "send"), ("loader_s", "read")):
                part = 1e3 * each["reader"][key] / each["reader"]["batches"]
                figures.append(Figure.of(f"{name}: reader, to {words}", part, "ms a step", "less", clock=True))
    return Record(figures, scale=f"{cores} cores for all processes of this machine")


def _rate(each: dict[str, Any]) -> float:
    steps = each["ranks"][0]["steps"]
    return float(each["way"]["batch"] * len(steps) / sum(steps))


@workload
@click.option("--scale", default=0.1, show_default=True, help="Of the large tables.")
@click.option("--share", default=0.1, show_default=True, help="Of the rows in DRAM, over all ranks.")
@click.option("--batch", default=4096, show_default=True, help="Samples of a step, over all ranks.")
@click.option("--steps", default=60, show_default=True)
@click.option("--most", default=4, show_default=True, help="Ranks at most.")
@click.option("--own-core", is_flag=True, help="Keep each process to a core of its own.")
def main(scratch: Path, scale: float, share: float, batch: int, steps: int, most: int, own_core: bool) -> Outcome:
    """Measure steps over ranks."""
    ways = [
        _Way(ranks, reads, scale, share, batch, steps, own_core)
        for reads in (False, True)
        for ranks in (1, 2, 4)
        if ranks <= most
    ]
    found = [_run(scratch, way) for way in ways]
    return Outcome(record(found, len(os.sched_getaffinity(0))), details={"found": found})


if __name__ == "__main__":
    main()
