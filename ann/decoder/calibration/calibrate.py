"""Effort measured on held-out contexts: the candidates, the list length and the way for each size of batch."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from memhier.ann.decoder.calibration.settings import FAR_PROBES, Choices, Method, Settings
from memhier.ann.decoder.coding.view import Codes
from memhier.ann.decoder.engine.dram_engine import DramEngine
from memhier.ann.decoder.engine.engine import ALL_DIRECTIONS, CERTIFY_LIMIT, Coarse, Effort, Walk
from memhier.ann.decoder.layer import Floats, Ints, OutputLayer

__all__ = [
    "EFS", "INSIDE", "LIMITS", "HeldOut", "calibrate_coarse", "calibrate_digits", "calibrate_far",
    "calibrate_preview", "calibrate_proof", "calibrate_screen", "calibrate_walk", "hold_out", "measure_choices",
    "scan_cost", "spare_preview",
]  # fmt: skip

LIMITS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
# Times the rank that reaches a precision on contexts held out. Of 512 of them one or two decide, by luck: for other
# contexts that rank reaches .993 to .999 in place of .9975, and four times that rank .999 or more.
_SPARE = 4
_DIGIT_SURVIVORS_MOST = 8192
_RANKED_AT_ONCE = 64  # contexts
_PREVIEW_LEAST = 48  # candidates cost little beside the scan, and contexts of another domain need more
EFS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_LEADING = (8, 16, 24, 32, 48, 64)
_SURVIVORS = (256, 512, 1024, 2048, 4096)
_NUMBERS = 8  # bytes of a row's offset and scale
_LOOKED_AT = 3000  # bytes that a scan reads in the time of one row read alone
_WORTH = 0.6  # a coarse scan costs at most this share of a scan of all directions
_PROOFS = (64, 256, CERTIFY_LIMIT)  # candidates of a proof
_PROVEN_HELD = 64  # contexts that measure proofs
_COARSE_HELD = 256  # contexts that measure a coarse scan
INSIDE = 0.98  # the share of the contexts that lie within the radius of a trusted walk
_FAR_HELD = 256  # made-up contexts that measure a walk far out
_FAR_SUM = 4  # contexts in each
_ROUNDS = 15
_FIRST_ROUNDS = 3
_HOPELESS = 1.5
_CLEARLY = 0.9
_HELD_OUT_MOST = 512

Option = TypeVar("Option")


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Contexts that the codes did not see, with their exact largest and k-th largest logits.

    Attributes
    ----------
    hidden
        float32 ``[n, D]``.
    kth, first
        float32 ``[n]``: the k-th largest and the largest exact logit, less the most that another order of summing takes
        from it. A word with as large a logit is right, so that ties do not count.
    likeliest
        int64 ``[n]``: the word of the largest logit.
    """

    hidden: Floats
    kth: Floats
    first: Floats
    likeliest: Ints
    k: int

    @classmethod
    def of(cls, layer: OutputLayer, hidden: Floats, k: int) -> "HeldOut":
        """Compute the full product for the contexts, in one pass over the layer."""
        wanted = min(k, layer.shape[0])
        best = np.full((len(hidden), wanted), -np.inf, np.float32)
        likeliest = np.zeros(len(hidden), np.int64)
        largest = 0.0  # norm of a row: if large terms cancel, rounding loses more than a logit is large
        for start, rows in layer.blocks():
            logits = hidden @ rows.T + layer.bias[start : start + len(rows)]
            most, at = best.max(1), logits.argmax(1)
            likeliest = np.where(np.take_along_axis(logits, at[:, None], 1)[:, 0] > most, start + at, likeliest)
            best = np.partition(np.concatenate([best, logits], 1), -wanted, axis=1)[:, -wanted:]
            largest = max(largest, float(np.linalg.norm(rows, axis=1).max(initial=0)))
        rounding = 1e-6 * largest * np.linalg.norm(hidden, axis=1)
        kth, first = (
            (value - 1e-5 * np.maximum(1, np.abs(value)) - rounding).astype(np.float32)
            for value in (best.min(1), best.max(1))
        )
        return cls(hidden, kth, first, likeliest, wanted)

    def some(self, count: int) -> "HeldOut":
        """Return the first `count` contexts."""
        return HeldOut(self.hidden[:count], self.kth[:count], self.first[:count], self.likeliest[:count], self.k)

    def precision(self, values: Floats) -> float:
        """Return the lower of two means over values found ``[n, k]``, largest first.

        One is the share of the k largest logits that are found, the other the share of contexts whose largest is.
        """
        every = (values[:, : self.k] >= self.kth[:, None]).mean()
        return float(min(every, (values[:, 0] >= self.first).mean()))


def hold_out(contexts: Floats, seed: int) -> tuple[Floats, Floats]:
    """Return contexts to learn from and contexts held out: a fifth, at most 512."""
    order = np.random.default_rng(seed).permutation(len(contexts))
    held = min(_HELD_OUT_MOST, len(contexts) // 5)
    return contexts[np.sort(order[held:])], contexts[np.sort(order[:held])]


def _first(options: Iterable[Option], reach: Callable[[Option], float], precision: float) -> tuple[Option, float]:
    """Return the first option that reaches the precision, or the first that comes nearest, and its precision."""
    best: tuple[Option, float] | None = None
    for option in options:
        reached = reach(option)
        if best is None or reached > best[1]:
            best = option, reached
        if reached >= precision:
            break
    assert best is not None
    return best


def calibrate_preview(engine: DramEngine, held: HeldOut, settings: Settings, precision: float) -> Settings:
    """Return settings with the fewest candidates that reach the precision, or come nearest to it."""
    limits = [limit for limit in LIMITS if limit >= max(held.k, _PREVIEW_LEAST)]
    # k candidates alone would leave no room for the error of an estimate.
    limits += [limit for limit in (2 * held.k, 4 * held.k) if limit > LIMITS[-1]]
    limit, reached = _first(
        limits, lambda limit: held.precision(engine.preview(held.hidden, held.k, limit).values), precision
    )
    return settings.with_(preview_limit=limit, reached=settings.reached | {"preview": reached})


def spare_preview(engine: DramEngine, held: HeldOut, settings: Settings) -> Settings:
    """Return settings with candidates to spare for likeliest words that rank lower than those of contexts held out."""
    most = min(settings.preview_limit, len(engine.codes.norms))
    spare = _SPARE * _rank_reached(engine, held, most, settings.asked)
    return settings.with_(preview_limit=max(settings.preview_limit, min(spare, LIMITS[-1])))


def _rank_reached(
    engine: DramEngine, held: HeldOut, most: int, precision: float, coarse: Coarse = ALL_DIRECTIONS
) -> int:
    """Return the rank by estimates up to which this share of the contexts' likeliest words lie, at most `most` + 1."""
    ranks = []
    for start in range(0, len(held.hidden), _RANKED_AT_ONCE):
        part = slice(start, start + _RANKED_AT_ONCE)
        right = engine.candidates(held.hidden[part], most, coarse) == held.likeliest[part, None]
        ranks += np.where(right.any(1), right.argmax(1), most).tolist()
    beyond = int((1 - precision) * len(ranks))
    return 1 + int(sorted(ranks)[-1 - beyond])


def calibrate_digits(engine: DramEngine, held: HeldOut, settings: Settings, precision: float) -> Settings:
    """Return settings with a scan of digits: the survivors and candidates that reach the precision, or none if none do.

    They are to spare as those of :func:`spare_preview`, by digits and by all directions.
    """
    words = len(engine.codes.norms)
    most, limit = min(words, _DIGIT_SURVIVORS_MOST), settings.limit(held.k, words)
    least = _SPARE * _rank_reached(engine, held, limit, settings.asked)
    limit = min(limit, max(held.k, _PREVIEW_LEAST, least))
    survivors = max(limit, _SPARE * _rank_reached(engine, held, most, settings.asked, Coarse(0, most)))
    while survivors <= most:
        tried = settings.with_(digit_limit=limit, digit_survivors=survivors)
        reached = held.precision(engine.preview(held.hidden, held.k, *tried.preview(held.k, words, True)).values)
        if reached >= precision:
            return tried.with_(reached=settings.reached | {"preview": reached})
        survivors *= 2
    return settings


def calibrate_proof(engine: DramEngine, held: HeldOut, settings: Settings) -> Settings:
    """Return settings with the candidates that proofs take, up to the next of a few numbers, and how many fail."""
    few, done, rows = held.hidden[:_PROVEN_HELD], 0, 0
    for limit in _PROOFS:
        proven = engine.certify(few, held.k, settings.limit(held.k, len(engine.codes.norms), limit)).proven
        assert proven is not None
        rows, done = rows + limit * max(0, int(proven.sum()) - done), max(done, int(proven.sum()))
    left = len(few) - done
    return settings.with_(proof_rows=(rows + left * _PROOFS[-1]) // len(few), unproven=left / len(few))


def calibrate_coarse(engine: DramEngine, held: HeldOut, settings: Settings, precision: float) -> Settings:
    """Return settings in which the preview scans leading directions first, if that costs less and loses nothing.

    They have twice the survivors that reach the precision, as contexts of another domain come less near.
    """
    words, width = len(engine.codes.norms), engine.codes.blocks.width
    whole, best = words * (width + _NUMBERS), (float("inf"), ALL_DIRECTIONS)
    few = held.some(_COARSE_HELD)

    def reached(coarse: Coarse) -> float:
        return few.precision(engine.preview(few.hidden, held.k, settings.preview_limit, coarse).values)

    # A scan of all directions may miss the largest logit of one context of few, which is a large share of them.
    precision = min(precision, reached(ALL_DIRECTIONS))

    for leading in (each for each in _LEADING if each < width):
        affordable = [
            each
            for each in _SURVIVORS
            if each >= settings.preview_limit and _coarse_cost(words, leading, each) < min(best[0], _WORTH * whole)
        ]
        # From many to few, so that a width that is too small costs one trial.
        enough = None
        for survivors in reversed(affordable):
            if reached(Coarse(leading, survivors)) < precision:
                break
            enough = survivors
        if enough is not None:
            best = min(best, (_coarse_cost(words, leading, enough), Coarse(leading, 2 * enough)))
    return settings.with_(coarse_width=best[1].width, survivors=best[1].survivors)


def _coarse_cost(words: int, leading: int, survivors: int) -> float:
    """Return the cost of a coarse scan in bytes that are read in the same time."""
    return words * (leading + _NUMBERS) + 2 * survivors * _LOOKED_AT


def calibrate_walk(engine: DramEngine, held: HeldOut, settings: Settings, precision: float) -> Settings:
    """Return settings with the shortest list that reaches the precision, then the fewest candidates that keep it."""
    effort, reached = _shortest_walk(engine, held, settings.probes, EFS, precision)
    return settings.with_(graph_ef=effort.ef, graph_limit=effort.limit, reached=settings.reached | {"graph": reached})


def _shortest_walk(
    engine: DramEngine, held: HeldOut, probes: int, efs: tuple[int, ...], precision: float
) -> tuple[Effort, float]:
    """Return the walk of least effort that reaches the precision, or comes nearest to it, and its precision."""

    def reach(effort: Effort) -> float:
        return held.precision(engine.walk(held.hidden, held.k, Walk(effort)).values)

    effort, reached = _first((Effort(probes, ef, max(ef, held.k)) for ef in efs), reach, precision)
    fewer = (Effort(probes, effort.ef, limit) for limit in LIMITS if held.k <= limit < effort.limit)
    found = ((each, reach(each)) for each in fewer)
    return next(((each, reached) for each, reached in found if reached >= precision), (effort, reached))


def calibrate_far(engine: DramEngine, held: HeldOut, settings: Settings, seed: int) -> Settings:
    """Return settings with a walk for contexts far from all seen ones, if it is as precise as the preview and cheaper.

    Far contexts are made up: the sum of four contexts' differences from the mean has four times the variance and the
    directions of real contexts. In measurements, walks erred no more on contexts of an unlearned domain than on these,
    or reached the declared precision. If the walk does not pay, the preview answers.
    """
    order = np.random.default_rng(seed).permutation(len(held.hidden))
    mean = held.hidden.mean(0)
    away = sum((held.hidden[np.roll(order, turn)] - mean for turn in range(_FAR_SUM)), np.zeros_like(mean))
    far = HeldOut.of(engine.layer, (mean + away)[:_FAR_HELD], held.k)
    efs = tuple(ef for ef in EFS if ef >= settings.graph_ef)
    effort, reached = _shortest_walk(engine, far, FAR_PROBES, efs, settings.asked)
    settings = settings.with_(reached=settings.reached | {"far": reached})
    looked, apart = np.empty(len(far.hidden), np.int64), np.empty(len(far.hidden), np.float32)
    engine.walk(far.hidden, held.k, Walk(effort), looked=looked, away=apart)
    if reached < settings.asked or float(looked.mean()) * _LOOKED_AT > scan_cost(engine.codes, settings):
        return settings
    far_radius = float(np.quantile(apart, INSIDE))
    return settings.with_(far_ef=effort.ef, far_limit=effort.limit, far_radius=far_radius)


def scan_cost(codes: Codes, settings: Settings) -> float:
    """Return the cost of a preview in bytes that are read in the same time."""
    words, width = len(codes.norms), codes.blocks.width
    if codes.digits is not None and settings.digit_survivors:
        row = _LOOKED_AT + 4 * len(codes.projection.mean)
        scanned = words * (codes.digits.count // 4 + _NUMBERS)
        return float(scanned + settings.digit_survivors * _LOOKED_AT + settings.digit_limit * row)
    if settings.coarse_width:
        return _coarse_cost(words, settings.coarse_width, settings.survivors // 2)
    return float(words * (width + _NUMBERS))


def calibrate_screen(engine: DramEngine, held: HeldOut, settings: Settings, precision: float) -> Settings:
    """Return settings with the fewest groups and candidates whose seeds reach the precision, or come nearest to it."""
    pairs = ((1, 16), (2, 24), (4, 32), (8, 32), (8, 64), (16, 64), (16, 128))
    effort, reached = _first(
        (Effort(probes, 0, max(limit, held.k)) for probes, limit in pairs),
        lambda effort: held.precision(engine.walk(held.hidden, held.k, Walk(effort)).values),
        precision,
    )
    reached_by_way = settings.reached | {"screen": reached}
    return settings.with_(screen_probes=effort.probes, screen_limit=effort.limit, reached=reached_by_way)


def measure_choices(ways: dict[Method, Callable[[Floats], object]], hidden: Floats, seed: int) -> Choices:
    """Return the fastest way by batch size, in ascending order: the median of interleaved rounds on real contexts.

    Parameters
    ----------
    ways
        Functions that answer a batch, by name.
    hidden
        Contexts to draw batches from.
    """
    rng = np.random.default_rng(seed)
    chosen: list[tuple[int, Method]] = []
    for batch in _BATCHES:
        best = _fastest(ways, [hidden[rng.integers(0, len(hidden), batch)] for _ in range(_ROUNDS)])
        if not chosen or chosen[-1][1] != best:
            chosen.append((batch, best))
    return tuple(chosen)


def _fastest(ways: dict[Method, Callable[[Floats], object]], batches: list[Floats]) -> Method:
    seconds: dict[Method, list[float]] = {name: [] for name in ways}
    for turn, states in enumerate(batches):
        for name in seconds:
            started = time.perf_counter()
            ways[name](states)
            if turn:  # the first round allocates
                seconds[name].append(time.perf_counter() - started)
        if turn >= _FIRST_ROUNDS:
            # The exact time of a slow way does not matter.
            least = min(float(np.median(taken)) for taken in seconds.values())
            seconds = {name: taken for name, taken in seconds.items() if float(np.median(taken)) <= _HOPELESS * least}
    # Another way must be clearly faster than the full product: two close ones change places from run to run.
    return min(seconds, key=lambda name: float(np.median(seconds[name])) * (_CLEARLY if name == "full" else 1))
