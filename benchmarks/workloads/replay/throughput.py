"""The rates of batches out of memory and of samples out of storage, next to other ways to keep them.

``python -m memhier.benchmarks.workloads.replay.throughput --dir /path/on/the/device`` draws batches of 32 random
samples on one thread, into arrays that are used again if a way can. Ways take turns, round after round, so neighbours
on the machine disturb all of them. "Cold" reads samples that are not in the page cache. "16 threads of pread" is the
rate of the device: a read for each sample past the page cache, with no check and no copy; the last figure is memhier's
share of it. "JPEG" keeps images packed in storage and unpacks them on the way, as the thread of a buffer does; all
other ways read them as they are, so the contents do not matter. TorchRL and cpprb take part if they are installed.
"""

import importlib.util
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import lmdb
import numpy as np
import torch
from numpy.typing import NDArray

from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.workloads.harness import Outcome, bars_of, by_turns, workload
from memhier.recsys.replay import CarouselBuffer, RandomSwap, StoredSamples

__all__ = ["main"]

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
    """Samples in storage, read past the page cache, as the thread of a buffer reads for swaps."""
    first = next(blocks)
    schema = {"image": ("uint8", first.shape[1:])}
    with CarouselBuffer(place, memory=1, schema=schema, swap=RandomSwap(1.0), codec=codec) as buffer:
        buffer.add({"image": first})
        for block in blocks:
            buffer.add({"image": block})
        buffer.checkpoint()
    stored, random = held.enter_context(StoredSamples(place)), np.random.default_rng(1)
    return lambda: stored.read(random.integers(0, len(stored), BATCH))


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
    """The rate of the device: the pages of each sample, past the page cache, with no check and no copy."""
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


def rates(way: Way, seconds: float) -> tuple[float, float]:
    """Return samples a second: batch over the median time of one, and all over the time of all."""
    way()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end or len(times) < 5:
        way()
        times.append(time.perf_counter() - start)
    return BATCH / float(np.median(times)), BATCH * len(times) / sum(times)


@workload
@click.option("--small", default=50_000, show_default=True, help="Samples of 32 x 32.")
@click.option("--large", default=8000, show_default=True, help="Samples of 224 x 224.")
@click.option("--rounds", default=7, show_default=True)
@click.option("--seconds", default=1.0, show_default=True, help="For each way in a round.")
def main(scratch: Path, small: int, large: int, rounds: int, seconds: float) -> Outcome:
    """Measure the rates of both tiers."""
    figures, bars, found = [], [], {}
    for side, count in ((32, small), (224, large)):
        if not count:
            continue
        place = scratch / f"{side}"
        place.mkdir()
        with ExitStack() as held:
            ways = make_ways(place, count, side, held)
            taken = by_turns({name: partial(rates, way, seconds) for name, way in ways.items()}, rounds)
        typical, mean = ({name: [each[part] for each in some] for name, some in taken.items()} for part in (0, 1))
        for name, values in typical.items():
            figures.append(Figure.of(f"{side} px, {name}", values, "samples/s", "more", clock=True))
        shares = [100 * memhier / device for memhier, device in zip(mean[COLD], mean[DEVICE], strict=True)]
        title = f"{side} px, cold: share of what the device gives to 16 threads"
        figures.append(Figure.of(title, shares, "%", "more", clock=True))
        bars.append(bars_of(f"Batches of {BATCH} images of {side} x {side}", "samples/s", typical))
        found[str(side)] = {name: {"typical": typical[name], "mean": mean[name]} for name in typical}
    return Outcome(Record(figures, bars=bars), details={"batch": BATCH, "rates": found})


if __name__ == "__main__":
    main()
