"""Ways against each other: interleaved rounds in one process, medians, processor time of the one thread at work.

What neighbours take of the processor does not count then; what they take of caches and memory still does, and hits all
ways in turn.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Answer", "Way", "measure", "precision"]

_BURST = 16
_BURST_MS = 3.0

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]
Answer: TypeAlias = Callable[[Floats], Ints]


@dataclass(frozen=True, slots=True)
class Way:
    """One way at one setting.

    Attributes
    ----------
    family, setting
        What it is and how it was set.
    answer
        Takes hidden states ``[n, D]`` to the words of their ten largest logits ``[n, 10]``.
    memory
        DRAM held for it besides the layer, in bytes.
    build_s
        Seconds that its build took.
    """

    family: str
    setting: str
    answer: Answer
    memory: int = 0
    build_s: float = 0.0

    @property
    def name(self) -> str:
        """Family and setting."""
        return f"{self.family}, {self.setting}" if self.setting else self.family


def measure(ways: list[Way], asked: Floats, batch: int, rounds: int) -> dict[str, list[float]]:
    """Return milliseconds of processor time per call by name, one number a round.

    In a round every way answers a burst of batches, as a decoder does that is asked word after word: each number is the
    median of one burst, of up to 16 calls within 3 ms. A first call, which finds caches full of the way before, does
    not count where there are others.
    """
    taken: dict[str, list[float]] = {way.name: [] for way in ways}
    starts = np.random.default_rng(0).integers(0, max(1, len(asked) - batch + 1), size=(rounds, _BURST))
    for turn in starts.tolist():
        for way in ways:
            burst: list[float] = []
            for start in turn:
                states = np.ascontiguousarray(asked[start : start + batch])
                started = time.thread_time()
                way.answer(states)
                burst.append(1e3 * (time.thread_time() - started))
                if sum(burst) > _BURST_MS:
                    break
            taken[way.name].append(float(np.median(burst[1:] or burst)))
    return taken


def precision(found: Ints, truth: Ints) -> float:
    """Return the mean share of the true words that were found."""
    hits: Any = (found[:, :, None] == truth[:, None, :]).any(2)
    return float(hits.sum(1).mean() / truth.shape[1])
