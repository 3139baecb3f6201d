"""Files passed, and moves between files, in one warm call of each main operation.

``python tests/house/moves.py [SYSTEM ...] [--show]`` runs from the root. The systems are zoom, tiered, store, bag,
replay and decode. ``--show`` lists the calls. Calls on the thread that serves the main thread count; calls on
background threads do not.
"""

import functools
import itertools
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np

from memhier import shield

ROOT = Path(__file__).resolve().parents[2]
SHOW = "--show" in sys.argv
MAIN = threading.get_ident()


class Recorder:
    """The calls of the operation under way."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] | None = None

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        # Python writes the `__init__` of a dataclass itself, and has some modules built in: they lie in no file.
        if event != "call" or self.calls is None or shield.caller() != MAIN or frame.f_code.co_filename[0] == "<":
            return
        file = Path(os.path.realpath(frame.f_code.co_filename))
        if not file.is_relative_to(ROOT):
            return
        parts = file.relative_to(ROOT).parts
        # The main thread begins to wait for its server at any moment of the server's work: that is no move.
        if parts[0] not in ("tests", ".venv") and frame.f_code.co_qualname != "_Task.wait":
            self.calls.append(("/".join(parts), frame.f_code.co_qualname))

    def measure(self, name: str, operation: Callable[[], Any]) -> Any:
        """Make one call and print its row; return its result."""
        self.calls = []
        result = operation()
        calls, self.calls = self.calls, None
        files = [file for file, _ in calls]
        moves = sum(before != after for before, after in itertools.pairwise(files))
        print(f"{name:40} calls {len(calls):5}  files {len(set(files)):3}  moves {moves:4}", flush=True)
        if SHOW:
            print(*(f"       {file} {call}" for file, call in calls), sep="\n")
        return result


RECORDER = Recorder()
measure = RECORDER.measure


def zoom(work: str) -> None:
    """Search, addition and commit of an index."""
    from memhier.ann import ZoomIndex

    rng = np.random.default_rng(0)
    centres = rng.normal(size=(50, 32))
    vectors = (centres[rng.integers(0, 50, 10_000)] + rng.normal(size=(10_000, 32)) / 2).astype(np.float32)
    prices = rng.uniform(0, 1, 10_000)
    with ZoomIndex.build(f"{work}/index", vectors, dram="3MiB", attributes={"p": prices}) as index:
        index.search(vectors[:1], k=5, recall=0.9)
        measure("ZoomIndex.search 1 query", lambda: index.search(vectors[5:6], k=5, recall=0.9))
        measure("ZoomIndex.search with where", lambda: index.search(vectors[5:6], k=5, recall=0.9, where="p < 0.5"))
        measure("ZoomIndex.add", lambda: index.add(vectors[:2], attributes={"p": [0.1, 0.2]}))
        measure("ZoomIndex.commit", index.commit)


def tiered(work: str) -> None:
    """Calls of a table larger than its cache."""
    from memhier import Tiered

    keys, ones = np.arange(150_000), np.ones((500, 8), np.float32)
    with Tiered(f"{work}/tier", "v", np.float32, 8, rows=200_000, dram="16MiB") as tier:
        for start in range(0, len(keys), 500):
            tier.scatter(keys[start : start + 500], ones)
        tier.gather(keys[-100:])
        measure("Tiered.gather all hits", lambda: tier.gather(keys[-100:]))
        measure("Tiered.gather 100 misses", lambda: tier.gather(keys[:100]))
        measure("Tiered.scatter", lambda: tier.scatter(keys[200:300], ones[:100]))
        ticket = measure("Tiered.prefetch", lambda: tier.prefetch(keys[400:500]))
        measure("Tiered.checkpoint", tier.checkpoint)
        del ticket


def store(work: str) -> None:
    """A transaction, and opening."""
    from memhier import Store

    def transaction() -> None:
        with made.begin() as tx:
            tx.put("a", b"2")
            tx.segment("q").append(np.arange(5_000))
            tx.commit()

    with Store.create(f"{work}/store", kind="x") as made:
        with made.begin() as tx:
            tx.put("a", b"1")
            tx.segment("z").append(np.arange(5_000))
            tx.commit()
        measure("Store transaction put+segment+commit", transaction)
    measure("Store.open", lambda: Store.open(f"{work}/store", kind="x")).close()


def bag(work: str) -> None:
    """Steps of training, plain and planned."""
    import torch

    from memhier.recsys import Adagrad, EmbeddingBag, lookahead

    torch.set_num_threads(1)
    torch.manual_seed(0)

    def ids() -> Any:
        return torch.randint(0, 100_000, (64, 4))

    with EmbeddingBag(100_000, 16, mode="sum", optimizer=Adagrad(lr=0.05), dram="32MiB", path=f"{work}/bag") as table:
        table(ids()).sum().backward()
        batch = ids()
        pooled = measure("EmbeddingBag.forward", lambda: table(batch))
        measure("backward (main thread)", lambda: pooled.sum().backward())
        batches = iter(lookahead([ids() for _ in range(6)], table, ids=lambda batch: batch))
        table(next(batches)).sum().backward()
        batch = measure("lookahead next (training thread)", functools.partial(next, batches))
        measure("forward+backward planned", lambda: table(batch).sum().backward())


def replay(work: str) -> None:
    """Calls of a replay buffer."""
    from memhier.recsys import CarouselBuffer

    rng = np.random.default_rng(0)

    def batch() -> dict[str, Any]:
        return {"image": rng.integers(0, 256, (32, 8, 8, 3), "uint8"), "logits": np.zeros((32, 10), "float32")}

    schema = {"image": ("uint8", (8, 8, 3)), "logits": ("float32", 10)}
    with CarouselBuffer(f"{work}/replay", memory=200, schema=schema, seed=0) as buffer:
        for _ in range(30):
            buffer.add(batch(), labels=rng.integers(0, 10, 32))
            buffer.feedback(buffer.sample(32))
        measure("CarouselBuffer.add 32", lambda: buffer.add(batch(), labels=rng.integers(0, 10, 32)))
        sample = measure("CarouselBuffer.sample", lambda: buffer.sample(32))
        measure("CarouselBuffer.feedback", lambda: buffer.feedback(sample))
        measure("CarouselBuffer.checkpoint", buffer.checkpoint)


def decode(work: str) -> None:
    """Answers of a decoder in DRAM."""
    import torch

    from memhier.ann import TopKSoftmax

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 5_000)
    contexts = torch.randn(1_000, 64) @ torch.randn(64, 64) / 4
    decoder = TopKSoftmax.from_linear(layer, k=10, precision=0.95, contexts=contexts[:800])
    decoder.topk(contexts[-2:-1])
    measure("TopKSoftmax.topk", lambda: decoder.topk(contexts[-1:]))
    measure("TopKSoftmax.log_prob", lambda: decoder.log_prob(contexts[-1:], torch.tensor([3])))


SYSTEMS = {kind.__name__: kind for kind in (zoom, tiered, store, bag, replay, decode)}


def main() -> None:
    """Measure the systems that the command names, or all."""
    threading.setprofile(RECORDER)
    sys.setprofile(RECORDER)
    asked = [name for name in sys.argv[1:] if not name.startswith("-")] or list(SYSTEMS)
    with tempfile.TemporaryDirectory(dir=".") as work:
        for name in asked:
            SYSTEMS[name](work)


if __name__ == "__main__":
    main()
