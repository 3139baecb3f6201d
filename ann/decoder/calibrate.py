"""Effort measured on held-out contexts: how many candidates, how long a list, which way for which batch."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.engine import Engine
from memhier.ann.decoder.layer import Floats, OutputLayer
from memhier.ann.decoder.settings import ALL_DIRECTIONS, Coarse, Settings

__all__ = [
    "LIMITS",
    "HeldOut",
    "calibrate_coarse",
    "calibrate_preview",
    "calibrate_screen",
    "calibrate_walk",
    "measure_choices",
    "split",
]

LIMITS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
_PREVIEW_LEAST = 48  # candidates cost little beside the scan, and contexts of another domain need more
_EFS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_LEADING = (8, 16, 24, 32, 48, 64)
_SURVIVORS = (256, 512, 1024, 2048, 4096)
_NUMBERS = 8  # bytes of a row's offset and scale
_SURVIVOR = 3000  # bytes that could be scanned in the time that a survivor takes
_WORTH = 0.6  # of the cost of all directions, at most
_COARSE_HELD = 256  # contexts that it is measured with
FAR_PROBES = 32
_FAR_EF, _FAR_LIMIT, _FAR_HELD = 384, 128, 192
_CHEAP_SCAN = 16 << 20  # bytes: a scan of as many takes as long as a long walk
_ROUNDS = 15
_FIRST_ROUNDS = 3
_HOPELESS = 1.5
_CLEARLY = 0.9
_HELD_OUT_MOST = 512

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Contexts that the codes did not see, with what is right for them.

    Attributes
    ----------
    hidden
        float32 ``[n, D]``.
    kth
        float32 ``[n]``: the k-th largest exact logit. A word with as much is right, so that ties do not count.
    k
        Of `kth`.
    """

    hidden: Floats
    kth: Floats
    k: int

    @classmethod
    def of(cls, layer: OutputLayer, hidden: Floats, k: int) -> "HeldOut":
        """Compute the full product for the contexts, in one pass over the layer."""
        wanted = min(k, layer.shape[0])
        best = np.full((len(hidden), wanted), -np.inf, np.float32)
        for start, rows in layer.blocks():
            logits = hidden @ rows.T + layer.bias[start : start + len(rows)]
            best = np.partition(np.concatenate([best, logits], 1), -wanted, axis=1)[:, -wanted:]
        return cls(hidden, best.min(1, initial=np.inf), wanted)

    def precision(self, values: Floats) -> float:
        """Return the mean share of the k largest that was found."""
        slack = 1e-5 * np.maximum(1, np.abs(self.kth))
        return float((values[:, : self.k] >= (self.kth - slack)[:, None]).mean())


def split(contexts: Floats, seed: int) -> tuple[Floats, Floats]:
    """Return contexts to learn from and contexts held out: a fifth, at most 512."""
    order = np.random.default_rng(seed).permutation(len(contexts))
    held = min(_HELD_OUT_MOST, len(contexts) // 5)
    return contexts[np.sort(order[held:])], contexts[np.sort(order[:held])]


def calibrate_preview(engine: Engine, held: HeldOut, settings: Settings, precision: float) -> Settings:
    """Return settings with the fewest candidates that reach the precision, or the most there are."""
    reached = 0.0
    limits = [limit for limit in LIMITS if limit >= max(held.k, _PREVIEW_LEAST)]
    # As many candidates as are wanted would leave no room for the error of an estimate.
    limits += [limit for limit in (2 * held.k, 4 * held.k) if limit > LIMITS[-1]]
    for limit in limits:
        settings = settings.with_(preview_limit=limit)
        reached = held.precision(engine.preview(held.hidden, held.k, limit).values)
        if reached >= precision:
            break
    return settings.with_(reached=settings.reached | {"preview": reached})


def calibrate_coarse(engine: Engine, held: HeldOut, settings: Settings, precision: float) -> Settings:
    """Return settings in which the preview scans leading directions first, where that costs less and loses nothing.

    The survivors that reach the precision are taken twice: contexts of another domain come less near.
    """
    words, width = len(engine.codes.norms), engine.codes.blocks.width
    whole, best = words * (width + _NUMBERS), (float("inf"), ALL_DIRECTIONS)
    states, kth = held.hidden[:_COARSE_HELD], held.kth[:_COARSE_HELD]
    few = HeldOut(states, kth, held.k)

    def reaches(coarse: Coarse) -> bool:
        found = engine.preview(states, held.k, settings.preview_limit, coarse)
        return few.precision(found.values) >= precision

    for leading in (each for each in _LEADING if each < width):
        affordable = [
            each
            for each in _SURVIVORS
            if each >= settings.preview_limit and _coarse_cost(words, leading, each) < min(best[0], _WORTH * whole)
        ]
        # From many to few, so that a width that cannot do it costs one trial.
        enough = None
        for survivors in reversed(affordable):
            if not reaches(Coarse(leading, survivors)):
                break
            enough = survivors
        if enough is not None:
            best = min(best, (_coarse_cost(words, leading, enough), Coarse(leading, 2 * enough)))
    return settings.with_(coarse_width=best[1].width, survivors=best[1].survivors)


def _coarse_cost(words: int, leading: int, survivors: int) -> float:
    """Return bytes read, or what takes as long."""
    return words * (leading + _NUMBERS) + 2 * survivors * _SURVIVOR


def calibrate_walk(engine: Engine, held: HeldOut, settings: Settings, precision: float) -> Settings:
    """Return settings with the shortest list that reaches the precision, then the fewest candidates that keep it."""
    reached, ef, probes = 0.0, _EFS[-1], settings.probes
    for ef in _EFS:
        reached = held.precision(engine.walk(held.hidden, held.k, probes, ef, max(ef, held.k))[0].values)
        if reached >= precision:
            break
    settings = settings.with_(graph_ef=ef, graph_limit=max(ef, held.k))
    for limit in (each for each in LIMITS if held.k <= each < ef):
        fewer = held.precision(engine.walk(held.hidden, held.k, probes, ef, limit)[0].values)
        if fewer >= precision:
            settings, reached = settings.with_(graph_limit=limit), fewer
            break
    return settings.with_(reached=settings.reached | {"graph": reached})


def calibrate_far(layer: OutputLayer, engine: Engine, held: HeldOut, settings: Settings, seed: int) -> Settings:
    """Return settings with a walk for contexts that are far from all seen, where it beats a scan and is as precise.

    It has a long list, and costs the same whatever the vocabulary. Far contexts are made: what sets two contexts apart
    from the mean, added up, has twice the variance and the directions of real ones. Where the walk loses its way there,
    the preview answers.
    """
    coarse, words, width = settings.coarse(held.k), len(engine.codes.norms), engine.codes.blocks.width
    if words * ((coarse.width or width) + _NUMBERS) < _CHEAP_SCAN:
        return settings
    limit = max(_FAR_LIMIT, settings.preview_limit, 4 * held.k)
    ef = max(_FAR_EF, 4 * settings.graph_ef, held.k)
    order = np.random.default_rng(seed).permutation(len(held.hidden))
    pairs = held.hidden[order] + held.hidden[np.roll(order, 1)] - held.hidden.mean(0)
    far = HeldOut.of(layer, pairs[:_FAR_HELD], held.k)
    reached = far.precision(engine.walk(far.hidden, held.k, FAR_PROBES, ef, min(ef, limit))[0].values)
    settings = settings.with_(reached=settings.reached | {"far": reached})
    return settings.with_(far_ef=ef, far_limit=min(ef, limit)) if reached >= settings.precision else settings


def calibrate_screen(engine: Engine, held: HeldOut, settings: Settings, precision: float) -> Settings:
    """Return settings with the fewest groups and candidates whose seeds alone reach the precision."""
    reached = 0.0
    for probes, limit in ((1, 16), (2, 24), (4, 32), (8, 32), (8, 64), (16, 64), (16, 128)):
        wanted = max(limit, held.k)
        reached = held.precision(engine.walk(held.hidden, held.k, probes, 0, wanted)[0].values)
        settings = settings.with_(screen_probes=probes, screen_limit=wanted)
        if reached >= precision:
            break
    return settings.with_(reached=settings.reached | {"screen": reached})


def measure_choices(
    ways: dict[str, Callable[[Floats], object]], hidden: Floats, seed: int
) -> tuple[tuple[int, str], ...]:
    """Return for sizes of batch in ascending order the fastest way: the median of interleaved rounds on real contexts.

    Parameters
    ----------
    ways
        By name, what answers a batch.
    hidden
        Contexts to draw batches from.
    """
    rng = np.random.default_rng(seed)
    chosen: list[tuple[int, str]] = []
    for batch in _BATCHES:
        best = _fastest(ways, [hidden[rng.integers(0, len(hidden), batch)] for _ in range(_ROUNDS)])
        if not chosen or chosen[-1][1] != best:
            chosen.append((batch, best))
    return tuple(chosen)


def _fastest(ways: dict[str, Callable[[Floats], object]], batches: list[Floats]) -> str:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn, states in enumerate(batches):
        for name in seconds:
            started = time.perf_counter()
            ways[name](states)
            if turn:  # the first round takes room
                seconds[name].append(time.perf_counter() - started)
        if turn >= _FIRST_ROUNDS:
            # Nobody needs to know how slow the slow ones are.
            least = min(float(np.median(taken)) for taken in seconds.values())
            seconds = {name: taken for name, taken in seconds.items() if float(np.median(taken)) <= _HOPELESS * least}
    # The full product is only left for what is clearly faster than it: two that are close change places by the run.
    return min(seconds, key=lambda name: float(np.median(seconds[name])) * (_CLEARLY if name == "full" else 1))
