"""How fast batches come out of memory and samples out of storage, next to other ways to keep them.

``python -m memhier.benchmarks.workloads.replay.throughput --dir /path/on/the/device`` prints a table, ``--json`` writes
it.

Batches of 32 distinct samples, drawn at random, on one thread, into arrays that are used again where a way can. Ways
take turns, round after round, so that what else the machine does hits all of them. "Cold" reads samples that are not in
the page cache. "16 threads of pread" is what the device gives: a read for each sample, past the page cache, nothing
checked and nothing copied; below the table stands what share of it memhier reaches. "JPEG" keeps images packed in
storage and unpacks them on the way, as the thread of a buffer does; all other ways read them as they are, so what they
show does not matter. TorchRL and cpprb take part where they are installed.
"""

import importlib.util
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import lmdb
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from memhier.benchmarks.bench.figures import Bar, Bars, Figure, Record
from memhier.benchmarks.workloads.options import folder_option, json_option
from memhier.recsys.replay import CarouselBuffer, RandomSwap
from memhier.recsys.replay.storage.storage import Storage

__all__ = ["main", "measure"]

BATCH = 32
COLD, DEVICE = "memhier, cold", "16 threads of pread, cold"
FILES = 4000  # most samples that are written to a file each
Draw = Callable[[], NDArray[np.int64]]
Way = Callable[[], Any]


def samples(count: int, side: int) -> Iterator[NDArray[np.uint8]]:
    """Yield images of noise in blocks of a thousand."""
    random = np.random.default_rng(0)
    for start in range(0, count, 1000):
        yield random.integers(0, 256, (min(1000, count - start), side, side, 3), np.uint8)


def pictures(count: int, side: int) -> Iterator[NDArray[np.uint8]]:
    """Yield images of soft blots with a little noise, which pack about as photographs do, in blocks of 500."""
    random = np.random.default_rng(0)
    for start in range(0, count, 500):
        some = min(500, count - start)
        blots = torch.from_numpy(random.uniform(0, 255, (some, 3, max(2, side // 16), max(2, side // 16))))
        wide = torch.nn.functional.interpolate(blots, (side, side), mode="bilinear").permute(0, 2, 3, 1).numpy()
        yield np.clip(wide + random.normal(0, 2, wide.shape), 0, 255).astype(np.uint8)


def make_ways(folder: Path, count: int, side: int, held: ExitStack) -> dict[str, Way]:
    """Return functions that fetch a batch each, by name."""
    random = np.random.default_rng(1)
    images = np.concatenate([*samples(count, side)])
    out = np.empty((BATCH, side, side, 3), np.uint8)

    def draw() -> NDArray[np.int64]:
        return random.integers(0, count, BATCH)

    tensor = torch.from_numpy(images)
    ways: dict[str, Way] = {
        "memhier, from memory": _memory(folder, images, held),
        "numpy, indexed": lambda: images[draw()],
        "numpy.take(out=)": lambda: np.take(images, draw(), axis=0, out=out, mode="clip"),
        "torch, indexed": lambda: tensor[torch.from_numpy(draw())],
        "Mammoth's layout": _mammoth(images, random),
        "LMDB, warm": _lmdb(folder, images, draw, out, held),
        "a file per sample, warm": _files(folder, images, random, out),
        COLD: _storage(folder / "storage", samples(count, side), {}, held),
        "memhier, cold, JPEG": _storage(folder / "jpeg", pictures(min(count, 4000), side), {"image": "jpeg:90"}, held),
        DEVICE: _threads(folder, images, random, held),
        "LMDB, cold": _cold_lmdb(folder, count, random, out, held),
        "a file per sample, cold": _files(folder, images, random, out, cold=True),
    }
    ways |= _cpprb(images) | _torchrl(folder, images)
    return ways


def _memory(folder: Path, images: NDArray[np.uint8], held: ExitStack) -> Way:
    """Everything in the memory tier."""
    buffer = CarouselBuffer(
        folder / "memory", memory=len(images), schema={"image": ("uint8", images.shape[1:])}, swap=None
    )
    held.callback(buffer.close)
    for start in range(0, len(images), 1000):
        buffer.add({"image": images[start : start + 1000]})
    batch = buffer.empty(BATCH)
    return lambda: buffer.sample(BATCH, batch)


def _storage(place: Path, blocks: Iterator[NDArray[np.uint8]], codec: dict[str, str], held: ExitStack) -> Way:
    """What the thread of a buffer does for swaps: samples in storage, read past the page cache."""
    first = next(blocks)
    schema = {"image": ("uint8", first.shape[1:])}
    buffer = CarouselBuffer(place, memory=1, schema=schema, swap=RandomSwap(1.0), codec=codec)
    held.callback(buffer.close)
    buffer.add({"image": first})
    for block in blocks:
        buffer.add({"image": block})
    buffer.checkpoint()
    store, meta = Storage.open_store(place, writable=False)
    storage, count, random = Storage(store, buffer.schema, codec, False), meta["size"], np.random.default_rng(1)
    held.callback(storage.close)
    room = {"image": buffer.empty(BATCH)["image"]}
    return lambda: storage.read(random.integers(0, count, BATCH), room)


def _mammoth(images: NDArray[np.uint8], random: np.random.Generator) -> Way:
    """float32 tensors and a draw without replacement from all: `utils/buffer.py` of aimagelab/mammoth."""
    floats = torch.from_numpy(images[: min(len(images), 2**31 // images[0].size // 4)]).float()

    def get_data() -> Any:
        chosen = np.random.RandomState(random.integers(2**31)).choice(len(floats), BATCH, replace=False)
        return torch.stack([image.cpu() for image in floats[chosen]])

    return get_data


def _lmdb(folder: Path, images: NDArray[np.uint8], draw: Draw, out: NDArray[np.uint8], held: ExitStack) -> Way:
    place = str(folder / "lmdb")
    environment = lmdb.open(place, map_size=4 * images.nbytes + 2**28, readahead=False, sync=False)
    with environment.begin(write=True) as tx:
        for index, image in enumerate(images):
            tx.put(index.to_bytes(8, "big"), image.tobytes())
    environment.sync(True)
    held.callback(environment.close)
    return _gets(environment, draw, out)


def _cold_lmdb(folder: Path, count: int, random: np.random.Generator, out: NDArray[np.uint8], held: ExitStack) -> Way:
    # A copy, whose pages no other way has brought in.
    shutil.copytree(folder / "lmdb", folder / "lmdb-cold")
    environment = lmdb.open(str(folder / "lmdb-cold"), readonly=True, readahead=False, lock=False)
    held.callback(environment.close)
    get = _gets(environment, lambda: random.integers(0, count, BATCH), out)
    file = folder / "lmdb-cold" / "data.mdb"

    def cold() -> None:
        _drop(file)
        get()

    return cold


def _gets(environment: Any, draw: Draw, out: NDArray[np.uint8]) -> Way:
    flat = out.reshape(len(out), -1)

    def get() -> None:
        with environment.begin(buffers=True) as tx:
            for row, index in enumerate(draw().tolist()):
                flat[row] = np.frombuffer(tx.get(index.to_bytes(8, "big")), np.uint8)

    return get


def _files(
    folder: Path, images: NDArray[np.uint8], random: np.random.Generator, out: NDArray[np.uint8], cold: bool = False
) -> Way:
    place = folder / "files"
    count = min(len(images), FILES)
    if not place.exists():
        place.mkdir()
        for index in range(count):
            images[index].tofile(place / f"{index}")
    flat = out.reshape(len(out), -1)

    def read() -> None:
        for row, index in enumerate(random.integers(0, count, BATCH).tolist()):
            if cold:
                _drop(place / f"{index}")
            flat[row] = np.fromfile(place / f"{index}", np.uint8)

    return read


def _threads(folder: Path, images: NDArray[np.uint8], random: np.random.Generator, held: ExitStack) -> Way:
    """What the device gives: the pages of a sample each, past the page cache, nothing checked and nothing copied."""
    file = folder / "plain"
    images.tofile(file)
    page, size = mmap.PAGESIZE, images[0].size
    pages = -(-size // page) + 1
    handle = os.open(file, os.O_RDONLY | os.O_DIRECT)
    held.callback(os.close, handle)
    pool = held.enter_context(ThreadPoolExecutor(16))
    rooms = [mmap.mmap(-1, pages * page) for _ in range(BATCH)]

    def read(room: mmap.mmap, sample: int) -> None:
        os.preadv(handle, [room], sample * size // page * page)

    return lambda: list(pool.map(read, rooms, random.integers(0, len(images) - 2, BATCH).tolist()))


def _drop(file: Path) -> None:
    """Ask the system to drop a file's pages."""
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def _cpprb(images: NDArray[np.uint8]) -> dict[str, Way]:
    if importlib.util.find_spec("cpprb") is None:
        return {}
    buffer = import_module("cpprb").ReplayBuffer(len(images), {"image": {"shape": images.shape[1:], "dtype": np.uint8}})
    buffer.add(image=images)
    return {"cpprb": lambda: buffer.sample(BATCH)}


def _torchrl(folder: Path, images: NDArray[np.uint8]) -> dict[str, Way]:
    if importlib.util.find_spec("torchrl") is None:
        return {}
    data: Any = import_module("torchrl.data")
    storage = data.LazyMemmapStorage(len(images), scratch_dir=str(folder / "torchrl"))
    buffer = data.TensorDictReplayBuffer(storage=storage, batch_size=BATCH)
    make = import_module("tensordict").TensorDict
    for start in range(0, len(images), 1000):
        some = torch.from_numpy(images[start : start + 1000])
        buffer.extend(make({"image": some}, batch_size=[len(some)]))
    return {"TorchRL LazyMemmap, warm": buffer.sample}


def measure(folder: Path | None, sizes: list[tuple[int, int]], rounds: int, seconds: float) -> dict[int, Any]:
    """Return, for each image size and way, the rates of every round: by the median batch, and by all of them."""
    torch.set_num_threads(1)
    found: dict[int, Any] = {}
    for side, count in sizes:
        with tempfile.TemporaryDirectory(dir=folder) as scratch, ExitStack() as held:
            ways = make_ways(Path(scratch), count, side, held)
            found[side] = {name: {"typical": [], "mean": []} for name in ways}
            for _ in range(rounds):
                for name, way in ways.items():
                    typical, mean = rates(way, seconds)
                    found[side][name]["typical"].append(typical)
                    found[side][name]["mean"].append(mean)
    return found


def rates(way: Way, seconds: float) -> tuple[float, float]:
    """Return samples a second: batch over the median time of one, and all over the time of all."""
    way()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end or len(times) < 5:
        way()
        times.append(time.perf_counter() - start)
    return BATCH / float(np.median(times)), BATCH * len(times) / sum(times)


def show(found: dict[int, Any]) -> Table:
    """Lay out medians over the rounds."""
    table = Table(title=f"samples a second in batches of {BATCH}, one thread; medians over rounds")
    for column in ("image", "way", "typical", "mean", "best round"):
        table.add_column(column, justify="left" if column in ("image", "way") else "right")
    for side, ways in found.items():
        for name, values in sorted(ways.items(), key=lambda item: -float(np.median(item[1]["typical"]))):
            typical, mean = (float(np.median(values[kind])) for kind in ("typical", "mean"))
            table.add_row(f"{side} px", name, f"{typical:,.0f}", f"{mean:,.0f}", f"{max(values['typical']):,.0f}")
    return table


def shares(ways: dict[str, Any]) -> list[float]:
    """Return what share of the device's rate cold reads reach, in % for every round."""
    pairs = zip(ways[COLD]["mean"], ways[DEVICE]["mean"], strict=True)
    return [100 * memhier / device for memhier, device in pairs]


def record(found: dict[int, Any]) -> Record:
    """Return rates as figures and bars."""
    figures, bars = [], []
    for side, ways in found.items():
        for name, values in ways.items():
            figures.append(Figure.of(f"{side} px, {name}", values["typical"], "samples/s", "more", clock=True))
        title = f"{side} px, cold: share of what the device gives to 16 threads"
        figures.append(Figure.of(title, shares(ways), "%", "more", clock=True))
        every = [Bar.of(name, values["typical"]) for name, values in ways.items()]
        bars.append(Bars(f"Batches of {BATCH} images of {side} x {side}", "samples/s", every))
    return Record(figures, bars=bars)


@click.command()
@folder_option
@click.option("--small", default=50_000, show_default=True, help="Samples of 32 x 32.")
@click.option("--large", default=8000, show_default=True, help="Samples of 224 x 224.")
@click.option("--rounds", default=7, show_default=True)
@click.option("--seconds", default=1.0, show_default=True, help="For each way in a round.")
@json_option
def main(folder: Path | None, small: int, large: int, rounds: int, seconds: float, out: Path | None) -> None:
    """Measure how fast samples come out of both tiers."""
    sizes = [(side, count) for side, count in ((32, small), (224, large)) if count]
    found = measure(folder, sizes, rounds, seconds)
    console = Console(width=100)
    console.print(show(found))
    for side, ways in found.items():
        rate = float(np.median(ways[DEVICE]["mean"])) * side * side * 3 / 1e9
        share = float(np.median(shares(ways)))
        console.print(
            f"{side} px: the device gives {rate:.2f} GB/s to single samples; memhier reaches {share:.0f} % of it"
        )
    if out is not None:
        record(found).write(out, batch=BATCH, rates={str(side): ways for side, ways in found.items()})


if __name__ == "__main__":
    main()
