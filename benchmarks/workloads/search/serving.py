"""A server under the load of many clients on loopback, beside the library's own threads with the same requests.

``python -m memhier.benchmarks.workloads.search.serving --clients 64 --seconds 10`` takes turns: as many threads as
clients search in a process of their own, then clients in a process of their own ask a server, in JSON and in binary.
All share the cores of this machine, so the clients' processor time stands beside the server's.
"""

import asyncio
import io
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, TypeAlias

import click
import numpy as np
import numpy.typing as npt

from memhier.ann import ZoomIndex
from memhier.benchmarks.bench.figures import Record
from memhier.benchmarks.datasets import load_search_set
from memhier.benchmarks.workloads.harness import Measure, Outcome, Row, by_turns, figures_of, rows_table, workload

__all__ = ["main"]

K, RECALL = 10, 0.95
BODIES = 256
MEASURES = (
    Measure("rate", "queries", "a second", "more", clock=True),
    Measure("share", "queries, of the library's own", "share", "more", clock=True),
    Measure("p50", "median of a request", "ms", clock=True),
    Measure("p99", "99th percentile of a request", "ms", clock=True),
    Measure("cpu", "processor time of library or replica", "ms a query", clock=True),
    Measure("ray_cpu", "processor time of Ray's other processes", "ms a second", clock=True),
    Measure("client_cpu", "processor time of clients", "ms a query", clock=True),
)
BINARY = "application/octet-stream"

Vectors: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Load:
    """Clients that ask for the neighbours of so many rows each, one request after the other, for some seconds."""

    queries: Vectors
    rows: int
    clients: int
    seconds: float

    def block(self, number: int) -> Vectors:
        """Return the queries of a request."""
        return self.queries[np.random.default_rng(number).integers(0, len(self.queries), self.rows)]


@dataclass(frozen=True, slots=True)
class Seen:
    """Seconds of each request, of all of them together, and of the processor."""

    seconds: list[float]
    elapsed: float
    cpu: float


def ask_library(path: str, load: Load) -> Seen:
    """Search from a thread for each client."""
    took: list[float] = []
    with ZoomIndex.open(path) as index:
        blocks = [load.block(number) for number in range(BODIES)]
        start, cpu = time.perf_counter(), time.process_time()

        def run(number: int) -> None:
            while (began := time.perf_counter()) - start < load.seconds:
                index.search(blocks[number % BODIES], K, recall=RECALL)
                took.append(time.perf_counter() - began)
                number += load.clients + 1

        threads = [Thread(target=run, args=(number,)) for number in range(load.clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return Seen(took, time.perf_counter() - start, time.process_time() - cpu)


def ask_server(url: str, form: str, load: Load) -> Seen:
    """Ask a server from a task for each client."""
    return asyncio.run(_ask(url, form, load))


async def _ask(url: str, form: str, load: Load) -> Seen:
    import aiohttp

    bodies = [_body(load.block(number), form) for number in range(BODIES)]
    headers = {"Content-Type": "application/json"} if form == "json" else {"Content-Type": BINARY, "Accept": BINARY}
    options = {} if form == "json" else {"k": K, "recall": RECALL}
    took: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:
        start, cpu = time.perf_counter(), time.process_time()

        async def run(number: int) -> None:
            while (began := time.perf_counter()) - start < load.seconds:
                async with session.post(f"{url}/search", data=bodies[number % BODIES], params=options) as answer:
                    content = await answer.read()
                if answer.status != 200:
                    raise AssertionError(f"{answer.status}: {content[:200]!r}")
                took.append(time.perf_counter() - began)
                number += load.clients + 1

        await asyncio.gather(*map(run, range(load.clients)))
        return Seen(took, time.perf_counter() - start, time.process_time() - cpu)


def _body(block: Vectors, form: str) -> bytes:
    if form == "json":
        return json.dumps({"vectors": block.tolist(), "k": K, "recall": RECALL}).encode()
    file = io.BytesIO()
    np.save(file, block)
    return file.getvalue()


@workload
@click.option("--data", default="sift-imagenet200k", show_default=True)
@click.option("--count", default=100_000, show_default=True, help="Vectors.")
@click.option("--dram", default="12MiB", show_default=True)
@click.option("--clients", default=64, show_default=True)
@click.option("--rows", default="1,16,64", show_default=True, help="Query vectors of a request.")
@click.option("--seconds", default=5.0, show_default=True, help="Of each turn.")
@click.option("--rounds", default=3, show_default=True)
def main(
    scratch: Path, data: str, count: int, dram: str, clients: int, rows: str, seconds: float, rounds: int
) -> Outcome:
    """Measure a server beside the library."""
    from memhier.ann.serving import IndexServer, ServingOptions

    case = load_search_set(data)
    place = str(scratch / "index")
    ZoomIndex.build(place, case.base[:count], dram=dram).close()
    queries = np.asarray(case.queries, np.float32)
    found: list[Row] = []
    with (
        IndexServer(place, ServingOptions(max_requests=2 * clients), port=_free_port()) as server,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other,
    ):
        for number in map(int, rows.split(",")):
            load = Load(queries, number, clients, seconds)
            ways: dict[str, Callable[[], Row]] = {
                "library": partial(_own, other, place, load),
                "json": partial(_served, other, server.url, "json", load),
                "binary": partial(_served, other, server.url, "binary", load),
            }
            _served(other, server.url, "json", Load(queries, number, clients, seconds / 5))  # warm
            turns = by_turns(ways, rounds)
            for form, each in turns.items():
                own = [row["rate"] for row in turns["library"]]
                found += [
                    {"form": form, "rows": number, **row, "share": row["rate"] / rate}
                    for row, rate in zip(each, own, strict=True)
                ]
    name = f"{{title}}, {{form}}, {{rows}} rows a request, {clients} clients"
    return Outcome(Record(figures_of(found, MEASURES, name)), [rows_table("each turn", found)], {"turns": found})


def _own(other: ProcessPoolExecutor, place: str, load: Load) -> Row:
    return _row(other.submit(ask_library, place, load).result(), load, None)


def _served(other: ProcessPoolExecutor, url: str, form: str, load: Load) -> Row:
    clients = other.submit(os.getpid).result()
    before = _ray_seconds(clients)
    seen = other.submit(ask_server, url, form, load).result()
    return _row(seen, load, _ray_seconds(clients) - before)


def _row(seen: Seen, load: Load, ray: npt.NDArray[np.float64] | None) -> Row:
    """Return the figures of a turn; without a server the processor time is the library's own."""
    cpu, others = (seen.cpu, 0.0) if ray is None else ray.tolist()
    asked = len(seen.seconds) * load.rows
    p50, p99 = np.percentile(seen.seconds, [50, 99])
    return {
        "rate": asked / seen.elapsed, "p50": 1e3 * float(p50), "p99": 1e3 * float(p99),
        "cpu": 1e3 * cpu / asked, "ray_cpu": 1e3 * others / seen.elapsed,
        "client_cpu": 0.0 if ray is None else 1e3 * seen.cpu / asked,
    }  # fmt: skip


def _ray_seconds(clients: int) -> npt.NDArray[np.float64]:
    """Return the processor time of the replica, and that of all other processes below this one but the clients'."""
    import psutil

    process: Any = psutil.Process(os.getpid())
    seconds = np.zeros(2)
    for each in process.children(recursive=True):
        if each.pid != clients:
            seconds[int("ServeReplica" not in " ".join(each.cmdline()))] += sum(each.cpu_times()[:2])
    return seconds


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
