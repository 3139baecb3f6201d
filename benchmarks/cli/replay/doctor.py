"""The reads of a training step, timed: does a disk keep up with swapping?"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from memhier.errors import FormatError
from memhier.recsys.replay import CarouselBuffer, StoredSamples
from memhier.recsys.replay.policies import FixedRatio, swaps

__all__ = ["examine"]

_TRIAL_BYTES = 64 * 2**20


def examine(
    path: Path, batch: int, ratio: float, step_s: float, seconds: float, sample_bytes: int | None
) -> dict[str, Any]:
    """Measure the disk of a buffer, or of a folder with samples of noise.

    Returns
    -------
    dict
        The reads of a step, their time, and ``verdict``; ``waits``, the share of steps that would wait; and
        ``sustained_ratio``, the largest ratio at which at most one step in a hundred would wait.

    Raises
    ------
    FormatError
        When `path` is no buffer, and `sample_bytes` is None.
    ValueError
        When the buffer holds too little.
    """
    if sample_bytes is None:
        try:
            stored = StoredSamples(path)
        except FormatError as error:
            raise FormatError(f"{error}; for a buffer to be made there, give the bytes of a sample") from error
        with stored:
            return _examine(stored, batch, ratio, step_s, seconds)
    with tempfile.TemporaryDirectory(dir=path) as scratch:
        place = Path(scratch) / "trial"
        _fill(place, sample_bytes, batch)
        with StoredSamples(place) as stored:
            return _examine(stored, batch, ratio, step_s, seconds)


def _fill(place: Path, sample_bytes: int, batch: int) -> None:
    random = np.random.default_rng(0)
    count = max(4 * batch, _TRIAL_BYTES // sample_bytes)
    with CarouselBuffer(place, memory=1, schema={"sample": ("uint8", sample_bytes)}) as buffer:
        for start in range(0, count, 256):
            size = (min(256, count - start), sample_bytes)
            buffer.add({"sample": random.integers(0, 256, size, np.uint8)})
        buffer.checkpoint()


def _examine(stored: StoredSamples, batch: int, ratio: float, step_s: float, seconds: float) -> dict[str, Any]:
    if len(stored) < batch:
        raise ValueError(f"batch={batch}: the buffer holds {len(stored)} samples; expected at least as many")
    wanted = swaps(FixedRatio(ratio), batch)
    random = np.random.default_rng(0)
    # The number asked for, and some between one and all of a batch, in turns.
    counts = sorted({wanted, *np.unique(np.geomspace(1, batch, 6).astype(int)).tolist()} - {0})
    times: dict[int, list[float]] = {count: [] for count in counts}
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(times[counts[-1]]) < 10:
        for count in counts:
            positions = random.integers(0, len(stored), count)
            start = time.perf_counter()
            stored.read(positions)
            times[count].append(time.perf_counter() - start)
    hidden = [count for count in counts if np.quantile(times[count], 0.99) <= step_s]
    sustained = max(hidden, default=0) / batch
    if wanted == 0:
        return {"verdict": "nothing is swapped", "sustained_ratio": sustained}
    asked = np.array(times[wanted])
    waits = float(np.mean(asked > step_s))
    share = f"{100 * waits:.1f} % of the steps would wait"
    return {
        "verdict": "keeps up" if wanted in hidden else f"too slow: {share}; use a ratio of {sustained:.2f}",
        "samples_read_a_step": wanted,
        "sample_bytes": stored.schema.sample_bytes,
        "median_ms": 1e3 * float(np.median(asked)),
        "p99_ms": 1e3 * float(np.quantile(asked, 0.99)),
        "step_ms": 1e3 * step_s,
        "waits": waits,
        "sustained_ratio": sustained,
    }
