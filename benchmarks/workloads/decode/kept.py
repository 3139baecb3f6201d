"""Indexes of faiss that take minutes to build, kept between runs with the seconds that their build took."""

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss

from memhier.benchmarks.peers.process import default_environments
from memhier.benchmarks.workloads.decode.layers import TrainedLayer

__all__ = ["kept_index"]


def kept_index(layer: TrainedLayer, kind: str, build: Callable[[], Any]) -> tuple[Any, float]:
    """Return an index and the seconds of its build, now or at the first call.

    Parameters
    ----------
    layer
        The layer to build from.
    kind
        Kind and settings; with a hash of the layer and faiss's version it names the file.
    """
    hasher = hashlib.blake2b(f"{kind} faiss {faiss.__version__}".encode(), digest_size=12)
    hasher.update(layer.weight.data)
    hasher.update(layer.bias.data)
    folder = default_environments().parent / "bench" / "decode"
    file, about = folder / f"{hasher.hexdigest()}.faiss", folder / f"{hasher.hexdigest()}.json"
    if about.exists():
        return faiss.read_index(str(file)), float(json.loads(about.read_text())["build_s"])
    started = time.thread_time()
    index = build()
    seconds = time.thread_time() - started
    _keep(index, file, about, {"what": kind, "build_s": seconds})
    return index, seconds


def _keep(index: Any, file: Path, about: Path, words: dict[str, object]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    faiss.write_index(index, str(part))
    part.replace(file)
    # Written last: an index without these words was not finished.
    about.write_text(json.dumps(words))
