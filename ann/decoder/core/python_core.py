"""The decoder's core without the compiled one: the same calls over NumPy arrays."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.core.python_draws import Draw, Tail, Uniforms
from memhier.ann.decoder.core.verdicts import Rule
from memhier.ann.decoder.layer import DTYPES, LARGEST, as_floats, least_error

__all__ = ["PythonCore", "allow_words", "unpacked"]

_ROUNDING = 1e-6
_SLACK = 1e-5
_LEADING_DIGITS = 64  # they have a step of the query for themselves
NO_ROW = 0xFFFFFFFF

Floats: TypeAlias = npt.NDArray[np.float32]
Doubles: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]


class _UnansweredError(Exception):
    """Ends the draw of a state."""


class PythonCore:
    """The same as ``memhier_native._core.DecoderCore``, with the same arguments."""

    def __init__(self, *, projection: Any, blocks: Any, codes: Any, graph: Any, exact: Any, digits: Any) -> None:
        self._mean, self._turn, self._common, self._rows = projection
        self._codes, self._graph, self._exact = codes, graph, exact
        self._numbers = self._bytes = None
        if blocks is not None:
            packed, numbers, width = blocks
            signed = (packed ^ 128).view(np.int8)
            self._bytes = signed.transpose(0, 2, 1, 3).reshape(-1, width)[: self._rows]
            self._numbers = numbers[:, : self._rows].astype(np.float64)
        self._digits = digits
        self._least = 0.0 if exact is None else least_error(DTYPES[exact[1]], len(self._mean))

    @property
    def workspace_bytes(self) -> int:
        """Codes and numbers as they are scanned; NumPy's temporaries live no longer than a call."""
        return 0 if self._bytes is None or self._numbers is None else int(self._bytes.nbytes + self._numbers.nbytes)

    def keep(self, *, calls: int, candidates: int, draws: int) -> int:
        """See the compiled core; a scan here makes floats of all codes, and a dozen arrays of as many numbers."""
        width = 0 if self._bytes is None else self._bytes.shape[1]
        return self.workspace_bytes + calls * int(self._rows) * (4 * int(width) + 12 * 8)

    def preview(
        self, *, hidden: Floats, limit: int, coarse: tuple[int, int], values: Floats, indices: Ints,
        rounding: tuple[float, float] = (0.0, 0.0), proven: Any = None, partition: Any = None, interval: bool = False,
        inverse: float = 1.0, variance: float = 0.0, allowed: Any = None,
    ) -> int:  # fmt: skip
        """See the compiled core."""
        bad = _first_bad(hidden)
        if bad >= 0:
            return bad
        norms, (per_norm, per_logit) = self._exact[3], rounding
        k, bounds = values.shape[1], proven is not None
        for number, state in enumerate(hidden):
            names = self._allowed(allowed, number)
            estimates, margins, variances = (each[names] for each in self._estimate(state, variance))
            keys = estimates + margins if bounds else estimates
            keys = self._after_coarse(keys, names, state, coarse, limit)
            order = np.argsort(-keys, kind="stable")
            order = order[keys[order] > -np.inf]
            places, cut = order[:limit], keys[order[limit]] if limit < len(order) else -np.inf
            chosen = names[places]
            logits = self._logits(state, chosen)
            norm = float(np.linalg.norm(state.astype(np.float64)))
            error = per_norm * norm * norms[chosen] + per_logit * np.abs(logits) + self._least
            if bounds:
                count = self._stop(keys[places], logits, error, k)
                cut = keys[places[count]] if count < len(places) else cut
                places, chosen, logits, error = places[:count], chosen[:count], logits[:count], error[:count]
            if partition is not None:
                partition[number] = _partition(
                    inverse * estimates,
                    inverse * margins,
                    inverse**2 * variances,
                    places,
                    inverse * logits,
                    inverse * error,
                )
                if not interval:
                    partition[number, 1:] = -np.inf, np.inf
            best = np.lexsort((chosen, -logits))
            _report(chosen[best], logits[best], k, values[number], indices[number])
            if proven is not None:
                proven[number] = _is_proven(logits[best], error[best], k, cut)
        return -1

    def listed(
        self, *, hidden: Floats, allowed: Any, values: Floats, indices: Ints,
        rounding: tuple[float, float] = (0.0, 0.0), proven: Any = None,
    ) -> int:  # fmt: skip
        """See the compiled core."""
        bad = _first_bad(hidden)
        if bad >= 0:
            return bad
        norms, (per_norm, per_logit), k = self._exact[3], rounding, values.shape[1]
        for number, state in enumerate(hidden):
            names = self._allowed(allowed, number)
            logits = self._logits(state, names)
            best = np.lexsort((names, -logits))
            _report(names[best], logits[best], k, values[number], indices[number])
            if proven is not None:
                norm = float(np.linalg.norm(state.astype(np.float64)))
                error = per_norm * norm * norms[names] + per_logit * np.abs(logits) + self._least
                proven[number] = _is_proven(logits[best], error[best], k, -np.inf)
        return -1

    def prove(
        self, *, hidden: Floats, logits: Floats, rounding: tuple[float, float], values: Floats, indices: Ints,
        proven: npt.NDArray[np.uint8],
    ) -> int:  # fmt: skip
        """See the compiled core."""
        bad = _first_bad(hidden)
        if bad >= 0:
            return bad
        (_, kind, _, norms), (per_norm, per_logit), k = self._exact, rounding, values.shape[1]
        whole = np.where(logits > -np.inf, logits.astype(np.float64), -np.inf)  # of NaN, too
        for number, (state, own) in enumerate(zip(hidden, whole, strict=True)):
            best = np.argsort(-own, kind="stable")[: k + 1]
            norm = float(np.linalg.norm(state.astype(np.float64)))
            doubt = 2 * (per_norm * norm * norms.max() + self._least) + per_logit * np.abs(own[best[k - 1 :]]).sum()
            proven[number] = len(best) == k or (np.isfinite(own[best[k]]) and own[best[k - 1]] - own[best[k]] > doubt)
            best = best[:k]
            found = own[best] if DTYPES[kind] == "float32" else self._logits(state, best)  # not rounded to the dtype
            order = np.lexsort((best, -found))
            _report(best[order], found[order], k, values[number], indices[number])
        return -1

    def candidates(
        self, *, hidden: Floats, coarse: tuple[int, int], rows: Ints, keys: Floats, left: Floats,
        coordinates: bool = False, bounds: bool = False, sums: Any = None, inverse: float = 1.0, variance: float = 0.0,
        allowed: Any = None,
    ) -> int:  # fmt: skip
        """See the compiled core."""
        bad = _first_bad(hidden, np.inf if coordinates else LARGEST)
        if bad >= 0:
            return bad
        limit = rows.shape[1]
        for number, state in enumerate(hidden):
            names = self._allowed(allowed, number)
            estimates, margins, variances = (each[names] for each in self._estimate(state, variance, coordinates))
            key = estimates + margins if bounds else estimates
            key = self._after_coarse(key, names, state, coarse, limit, coordinates)
            order = np.argsort(-key, kind="stable")
            order = order[key[order] > -np.inf]
            chosen = order[:limit]
            rows[number], keys[number] = -1, -np.inf
            rows[number, : len(chosen)] = names[chosen]
            keys[number, : len(chosen)] = np.stack([key[chosen], estimates[chosen]], 1)
            left[number] = key[order[limit]] if limit < len(order) else -np.inf
            if sums is not None:
                scaled, around = inverse * estimates, inverse * margins
                three = scaled + inverse**2 * variances, scaled - around, scaled + around
                reference = float(scaled.max())
                sums[number] = [*(float(np.exp(each - reference).sum()) for each in three), reference]
        return -1

    def envelope(
        self, *, hidden: Floats, shape: tuple[float, float], out: Ints | None, rows: Ints, logits: Floats, ends: Doubles
    ) -> int:
        """See the compiled core."""
        bad = _first_bad(hidden)
        if bad >= 0:
            return bad
        for number, state in enumerate(hidden):
            tail = self._tail(state, shape, None if out is None else out[number])
            chosen = tail.take(rows.shape[1])
            rows[number], logits[number] = -1, -np.inf
            rows[number, : len(chosen)] = chosen
            ends[number] = tail.largest, tail.log_sum
            if self._exact is not None:
                logits[number, : len(chosen)] = self._logits(state, chosen)
        return -1

    def draw(
        self, *, hidden: Floats, shape: tuple[float, float], rule: tuple[float, float, float, float, float],
        temperature: float, rounding: float, stages: Ints, seeds: npt.NDArray[np.uint64], out: Ints | None,
        scores: Doubles | None, exchange: Any, drawn: Ints, stays: npt.NDArray[np.uint8],
    ) -> int:  # fmt: skip
        """See the compiled core."""
        bad = _first_bad(hidden)
        if bad >= 0:
            return bad
        for number, state in enumerate(hidden):

            def logits(rows: Ints, number: int = number, state: Floats = state) -> Doubles:
                found = np.full(len(rows), -np.inf) if self._exact is None else self._logits(state, rows)
                if exchange is None or not len(rows):
                    return found
                asked, exact, answer, ask = exchange
                asked[: len(rows)], exact[: len(rows)] = rows, found
                if not ask(number, len(rows)):
                    raise _UnansweredError
                return np.array(answer[: len(rows)], np.float64)

            words = np.empty(0, np.int64) if out is None else out[number]
            changed = np.empty(0) if scores is None else scores[number]
            draw = Draw(
                self._tail(state, shape, words), (words[words >= 0], changed[words >= 0]), logits, Rule(*rule),
                shape[1], temperature, rounding, Uniforms(int(seeds[number])),
            )  # fmt: skip
            with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # tails without end leave all open
                try:
                    drawn[number], stays[number] = draw(stages)
                except _UnansweredError:
                    drawn[number], stays[number] = -1, False
        return -1

    def _tail(self, state: Floats, shape: tuple[float, float], out: Ints | None) -> Tail:
        """Return the capped bounds of all rows but those given."""
        estimates, margins, _ = self._estimate(state, 0.0)
        bounds, (cap, inverse) = estimates + margins, shape
        if cap > 0:
            bounds = cap * np.tanh(bounds / cap)
        if out is not None:
            bounds[out[out >= 0]] = -np.inf
        return Tail(bounds, inverse)

    def walk(
        self, *, hidden: Floats, near: tuple[int, int, int], radius: float = np.inf,
        far: tuple[int, int, int] = (0, 0, 0), far_radius: float = 0.0, values: Floats, indices: Ints,
        distances: Any = None, tally: Any = None, allowed: Any = None,
    ) -> int:  # fmt: skip
        """See the compiled core."""
        bad = _first_bad(hidden)
        if bad >= 0:
            return bad
        links, centres, halves, starts, seeds = self._graph
        codes, (offsets, scales) = self._codes
        k, width = values.shape[1], codes.shape[1]
        for number, state in enumerate(hidden):
            z = self._turn[:width] @ (state - self._mean)
            bytes_, step = _round(z)
            away = halves - centres @ z
            apart = max(0.0, 2 * float(away.min()) + float(z @ z))
            if distances is not None:
                distances[number] = apart
            probes, ef, limit = far if apart > radius else near
            values[number], indices[number] = -np.inf, -1
            if tally is not None:
                tally[number] = 0
            if apart > max(radius, far_radius):
                continue
            groups = np.argsort(away, kind="stable")[:probes]
            planted = np.concatenate([seeds[starts[group] : starts[group + 1]] for group in groups])
            planted = np.unique(planted.astype(np.int64))

            def estimate(
                rows: Ints, bytes_: Ints = bytes_, step: float = step, codes: Any = codes, scales: Any = scales
            ) -> Doubles:
                dots = (codes[rows].astype(np.int64) - 128) @ bytes_
                found: Doubles = offsets[rows] + scales[rows] * (step * dots)
                return found

            keep = max(ef, limit) * (1 if allowed is None else 2)
            names, found, looked = _walk(planted, estimate, links, keep, ef)
            if allowed is not None:
                inside = np.isin(names, self._allowed(allowed, number))
                names, found = names[inside], found[inside]
            short = allowed is not None and len(names) < limit
            names, found = names[: 0 if short else limit], found[: 0 if short else limit]
            if self._exact is not None:
                found = self._logits(state, names)
            else:
                found = found + float(self._common @ (state - self._mean))
            best = np.lexsort((names, -found))
            _report(names[best], found[best], k, values[number], indices[number])
            if tally is not None:
                tally[number] = looked
        return -2 if (indices[:, -1] < 0).any() else -1

    def _estimate(
        self, state: Floats, variance: float, coordinates: bool = False, coarse: int | None = None
    ) -> tuple[Doubles, Doubles, Doubles]:
        """Return estimates of all logits, the margins to their bounds, and half their variances."""
        assert self._bytes is not None
        assert self._numbers is not None
        width = self._bytes.shape[1]
        if coordinates:
            z, shift = state.astype(np.float64), 0.0
        else:
            away = state.astype(np.float64) - self._mean
            z, shift = self._turn @ away, float(self._common @ away)
        bytes_, step = _round(z[:width])
        inside, outside = float(np.linalg.norm(z[:width])), float(np.linalg.norm(z[width:]))
        rounded = float(np.linalg.norm(z[:width] - step * bytes_))
        offsets, scales, beyond, lost, coded = self._numbers
        # Whole numbers below 2**24 up to a width of 1,024: single precision adds them exactly.
        dots = self._bytes[:, :coarse].astype(np.float32) @ bytes_[:coarse].astype(np.float32)
        estimates = offsets + shift + scales * (step * dots.astype(np.float64))
        terms = np.abs(offsets) + abs(shift) + (coded + lost) * inside
        margins = beyond * outside + lost * inside + coded * rounded + _ROUNDING * terms
        return estimates, margins, 0.5 * variance * np.square(beyond * outside)

    def _allowed(self, allowed: Any, number: int) -> Ints:
        """Return the rows that a state may find, of bits uint64 ``[n, words]``, or ``[1, words]`` for all states."""
        if allowed is None:
            return np.arange(self._rows)
        return np.flatnonzero(unpacked(allowed[[0 if len(allowed) == 1 else number]], self._rows))

    def _after_coarse(
        self, keys: Doubles, names: Ints, state: Floats, coarse: tuple[int, int], limit: int, coordinates: bool = False
    ) -> Doubles:
        """Return keys in which only the best by a coarse scan are left, if one is asked for."""
        width, survivors = coarse
        if width == 0 and 0 < survivors <= limit:
            return self._by_digits(state, coordinates)[names]
        if survivors == 0 or survivors >= len(keys):
            return keys
        if width == 0:
            estimates = self._by_digits(state, coordinates)
        else:
            estimates, _, _ = self._estimate(state, 0.0, coordinates, width)
        left = np.full_like(keys, -np.inf)
        best = np.argsort(-estimates[names], kind="stable")[:survivors]
        left[best] = keys[best]
        return left

    def _by_digits(self, state: Floats, coordinates: bool) -> Doubles:
        """Return estimates of all logits by the digits."""
        assert self._numbers is not None
        codes, directions, values = self._digits
        away = state.astype(np.float64) - (0 if coordinates else self._mean)
        z, shift = (away, 0.0) if coordinates else (self._turn @ away, float(self._common @ away))
        four = codes.transpose(0, 2, 1, 3).reshape(-1, len(directions) // 16, 1, 4)[: self._rows]
        digits = ((four >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & 3).reshape(len(four), -1).astype(np.float32)
        sums = np.zeros(len(four))
        for part in (slice(0, _LEADING_DIGITS), slice(_LEADING_DIGITS, None)):
            bytes_, step = _round(values[part] * z[directions[part]])
            sums += step * ((digits[:, part] - np.float32(1.5)) @ bytes_.astype(np.float32)).astype(np.float64)
        found: Doubles = self._numbers[0] + shift + self._numbers[4] * sums
        return found

    def _logits(self, state: Floats, rows: Ints) -> Doubles:
        weight, kind, bias, _ = self._exact
        logits: Doubles = (as_floats(weight[rows], DTYPES[kind]) @ state + bias[rows]).astype(np.float64)
        return logits

    @staticmethod
    def _stop(keys: Doubles, logits: Doubles, error: Doubles, k: int) -> int:
        """Return how many candidates, by descending upper bound, are looked at before none left can be among the k."""
        for count in range(k, len(keys)):
            kth = np.partition(logits[:count], count - k)[count - k]
            if keys[count] < kth - 2 * error[:count].max():
                return count
        return len(keys)


def allow_words(*, allowed: Any, words: int, ends: Ints | None, bits: npt.NDArray[np.uint64], counts: Ints) -> int:
    """See the compiled core."""
    if allowed.itemsize == 8:
        outside = np.flatnonzero((allowed < 0) | (allowed >= words))
        if len(outside):
            return int(outside[0])
        mask = np.zeros((len(counts), words), np.bool_)
        mask[0 if ends is None else np.repeat(np.arange(len(counts)), np.diff(ends)), allowed] = True
    elif allowed.itemsize == 1:
        mask = allowed.reshape(len(counts), words)
    else:
        octets = np.ascontiguousarray(allowed).astype("<i4", copy=False).view(np.uint8)
        octets = octets.reshape(len(counts), -(-words // 32) * 4)
        mask = np.unpackbits(octets, axis=1, bitorder="little", count=words).view(np.bool_)
    packed = bits.view(np.uint8)
    packed[:, : -(-words // 8)] = np.packbits(mask, axis=1, bitorder="little")
    counts[:] = np.count_nonzero(mask, axis=1)
    empty = np.flatnonzero(counts == 0)
    return -2 - int(empty[0]) if len(empty) else -1


def unpacked(bits: npt.NDArray[np.uint64], words: int) -> npt.NDArray[np.bool_]:
    """Return bits, uint64 ``[n, padded / 64]``, as a mask, bool ``[n, words]``."""
    return np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little", count=words).view(np.bool_)


def _round(z: npt.NDArray[Any]) -> tuple[Ints, float]:
    largest = np.float32(np.abs(z).max(initial=0))
    inverse = np.float32(127) / largest if largest > 0 else np.float32(0)
    return np.clip(np.rint(z.astype(np.float32) * inverse), -127, 127).astype(np.int64), float(
        largest / np.float32(127)
    )


def _walk(planted: Ints, estimate: Any, links: Any, keep: int, ef: int) -> tuple[Ints, Doubles, int]:
    """Return the rows that a list of the `ef` best led to, best first, their estimates, and how many were looked at."""
    seen = set(planted.tolist())
    listed = sorted(zip((-estimate(planted)).tolist(), planted.tolist(), strict=True))[:keep]
    expanded: set[int] = set()
    looked = len(planted)
    while links.shape[1]:
        row = next((row for _, row in listed[:ef] if row not in expanded), None)
        if row is None:
            break
        expanded.add(row)
        fresh = [int(other) for other in links[row] if other != NO_ROW and int(other) not in seen]
        seen.update(fresh)
        looked += len(fresh)
        if fresh:
            near = (-estimate(np.array(fresh))).tolist()
            listed = sorted([*listed, *zip(near, fresh, strict=True)])[:keep]
    return np.array([row for _, row in listed], np.int64), -np.array([near for near, _ in listed]), looked


def _report(rows: Ints, logits: Doubles, k: int, values: Floats, indices: Ints) -> None:
    values[:], indices[:] = -np.inf, -1
    values[: len(rows)], indices[: len(rows)] = logits[:k], rows[:k]


def _is_proven(logits: Doubles, error: Doubles, k: int, cut: float) -> bool:
    """Say if the first k of rows in order are the largest, no other being above `cut`."""
    if len(logits) < k:
        return cut == -np.inf  # they are all there are
    least = logits[k - 1] - error[k - 1]
    return bool(cut < least and (logits[k:] + error[k:] < least).all())


def _partition(
    estimates: Doubles, margins: Doubles, variances: Doubles, chosen: Ints, logits: Doubles, error: Doubles
) -> tuple[float, float, float]:
    """Return log of the sum of exp of all logits, the chosen ones exact: an estimate and bounds."""
    reference = float(estimates.max())
    left = np.ones(len(estimates), bool)
    left[chosen] = False
    found = []
    for tail, head, slack in (
        (np.minimum(estimates + variances, reference + 80), logits, 0.0),
        (estimates - margins, logits - error, -_SLACK),
        (estimates + margins, logits + error, _SLACK),
    ):
        exact, beyond = np.logaddexp.reduce(head), np.logaddexp.reduce(tail[left], initial=-np.inf) + slack
        found.append(float(np.logaddexp(exact, beyond)))
    return float(np.clip(found[0], found[1], found[2])), found[1], found[2]


def _first_bad(hidden: Floats, most: float = LARGEST) -> int:
    bad = np.flatnonzero(~(np.isfinite(hidden) & (np.abs(hidden) <= most)).all(1))
    return int(bad[0]) if len(bad) else -1
