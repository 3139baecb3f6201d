"""Ways to the largest logits, timed by turns in one process: medians of the processor time of one thread.

So the processor time of neighbours does not count. Their use of caches and memory still does, and disturbs all ways
alike. A model asks a decoder once a token, after its layers: so every way is measured cold, after other work has taken
the caches, and warm, one call after the other.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Answer", "OtherWork", "Times", "Way", "measure", "precision"]

_BURST = 16
_BURST_MS = 3.0
_OTHER_BYTES = 48 << 20

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]
Answer: TypeAlias = Callable[[Floats], Ints]


@dataclass(frozen=True, slots=True)
class Way:
    """One way at one setting.

    Attributes
    ----------
    family, setting
        Its kind and its parameters.
    answer
        Maps hidden states ``[n, D]`` to the words of their ten largest logits ``[n, 10]``.
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


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of processor time per call by name, one number a round.

    Attributes
    ----------
    cold
        Of a call after other work.
    warm
        Of calls one after the other.
    """

    cold: dict[str, list[float]]
    warm: dict[str, list[float]]

    def medians(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the medians of the rounds, cold and warm."""
        cold, warm = (
            {name: float(np.median(each)) for name, each in taken.items()} for taken in (self.cold, self.warm)
        )
        return cold, warm


class OtherWork:
    """The work of a model between two calls of its output layer: it reads and writes 48 MB of other memory."""

    def __init__(self) -> None:
        self._memory = np.zeros(_OTHER_BYTES // 4, np.float32)

    def __call__(self) -> None:
        """Do it."""
        self._memory += 1


def measure(ways: list[Way], asked: Floats, batch: int, rounds: int) -> Times:
    """Return milliseconds of processor time per call, one number a round of each way, cold and warm.

    In a round every way answers one batch after other work, in an order drawn for the round: the first one finds less
    code and fewer rows in the caches. Then comes a burst of batches right after each other: the warm number is the
    median of one burst, of up to 16 calls within 3 ms. The cold call and the time between calls do not count there.
    """
    cold: dict[str, list[float]] = {way.name: [] for way in ways}
    warm: dict[str, list[float]] = {way.name: [] for way in ways}
    starts = np.random.default_rng(0).integers(0, max(1, len(asked) - batch + 1), size=(rounds, 1 + _BURST))
    other, orders = OtherWork(), np.random.default_rng(1)
    for turn in starts.tolist():
        for way in (ways[place] for place in orders.permutation(len(ways))):
            other()
            cold[way.name].append(_taken(way, asked[turn[0] : turn[0] + batch]))
            burst: list[float] = []
            for start in turn[1:]:
                burst.append(_taken(way, asked[start : start + batch]))
                if sum(burst) > _BURST_MS:
                    break
            warm[way.name].append(float(np.median(burst)))
    return Times(cold, warm)


def _taken(way: Way, states: Floats) -> float:
    states = np.array(states)  # in the cache, as the layers before have just made them
    started = time.thread_time()
    way.answer(states)
    return 1e3 * (time.thread_time() - started)


def precision(found: Ints, truth: Ints) -> float:
    """Return the mean share of the true words that were found."""
    hits: Any = (found[:, :, None] == truth[:, None, :]).any(2)
    return float(hits.sum(1).mean() / truth.shape[1])
