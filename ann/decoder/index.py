"""LogitIndex: the largest logits of an output layer without the full product, for NumPy arrays."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.allowed import Allowed, check_allowed
from memhier.ann.decoder.answers import LogProb, Partition, TopK
from memhier.ann.decoder.calibration.audit import STATES_MOST, PrecisionAudit
from memhier.ann.decoder.calibration.build import BuildOptions, build_codes, encode_again, warn_if_short
from memhier.ann.decoder.calibration.calibrate import measure_choices
from memhier.ann.decoder.calibration.cost import full_costs_less, listed_costs_less, proof_costs_less
from memhier.ann.decoder.calibration.familiar import Familiarity, pause_after
from memhier.ann.decoder.calibration.settings import HEAD, METHODS, WAYS, Choices, Method, Settings
from memhier.ann.decoder.calibration.walk_audit import WALKS_MOST, WalkAudit
from memhier.ann.decoder.coding.codes import encode
from memhier.ann.decoder.engine.dram_engine import DramEngine
from memhier.ann.decoder.engine.draws import DrawRequest
from memhier.ann.decoder.engine.engine import CERTIFY_LIMIT, Engine, Walk
from memhier.ann.decoder.engine.envelope import AS_IS, Doubles, Envelope, Shape
from memhier.ann.decoder.engine.masked import full_among
from memhier.ann.decoder.layer import (
    Floats,
    Ints,
    OutputLayer,
    check_hidden,
    check_layer,
    logit_error,
)
from memhier.ann.decoder.stored import check_place, open_index, save_index
from memhier.arguments import check_int
from memhier.budget import parse_bytes
from memhier.shield import close_made, shielded, shielded_giving
from memhier.store.store import CACHE_BYTES, Verify

__all__ = ["LogitIndex", "way_for"]

_WALKED = 0.5  # the least share of allowed words for a walk, whose list is twice as long then
_FULL_BLOCK = 64  # states whose logits are held at a time


def way_for(choices: Choices, batch: int) -> Method:
    """Return the way of the last choice, in ascending order of batches, whose batch is at most this one."""
    for least, way in reversed(choices):
        if batch >= least:
            return way
    return choices[0][1]


class LogitIndex:
    """Finds the largest logits of an output layer, after FGD (arXiv 1806.04189).

    Make one with :meth:`build`. Answers are exact logits of the words found. Several threads may call it at a time.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.ann import LogitIndex
    >>> rng = np.random.default_rng(0)
    >>> weight = rng.normal(size=(1000, 32)).astype("float32")
    >>> hidden = rng.normal(size=(500, 32)).astype("float32")
    >>> index = LogitIndex.build(weight, contexts=hidden[1:], k=5)
    >>> bool(index.topk(hidden[:1], 1).indices[0, 0] == (weight @ hidden[0]).argmax())
    True
    """

    def __init__(
        self, engine: Engine, settings: Settings, method: Method, digest: str, audit: PrecisionAudit | None = None
    ) -> None:
        self._engine, self._settings, self._method = engine, settings, method
        self._audit = audit or PrecisionAudit(0.0, 0, settings.precision)
        self.digest: str = digest
        self._words, self._dimension = engine.codes.shape
        self._prepare()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled or copied index; it counts the states that it answers from zero."""
        self.__dict__.update(state)
        self._audit = copy(self._audit)
        self._prepare()

    def _prepare(self) -> None:
        settings, engine = self._settings, self._engine
        self._familiarity = Familiarity(engine.codes.projection, settings.ranges, self._audit)
        self._walk_audit = WalkAudit(settings.precision)
        # A call after other work finds nothing in the caches, so it makes few objects and calls few functions.
        self._rest = [0, 0]  # other calls, and walks, until the next one whose states and answer are compared
        self._turns = 0
        self._most_walked = 0 if engine.codes.graph is None else min(settings.k, self._words - 1)
        self._proof_paid = -1, True  # a batch, and if its proofs cost less
        self._walks: dict[str, Walk] = {way: settings.walk(way) for way in ("graph", "screen")}
        engine.keep(settings.candidates_most)

    @classmethod
    def build(
        cls,
        weight: npt.NDArray[Any],
        bias: npt.ArrayLike | None = None,
        *,
        dtype: str | None = None,
        contexts: npt.ArrayLike | None = None,
        k: int = 10,
        precision: float = 0.99,
        method: Method = "auto",
        rank: int | None = None,
        dram: int | str | None = None,
        path: str | PathLike[str] | None = None,
        full: Callable[[Floats], object] | None = None,
        seed: int = 0,
        audit: float = 0.0,
        progress: bool = False,
    ) -> Self:
        """Build an index of a layer.

        Parameters
        ----------
        weight
            ``[V, D]``: float32 or float16, or uint16 that holds bfloat16 with ``dtype="bfloat16"``. The index shares a
            contiguous array: do not change it afterwards. A layer larger than DRAM may be a ``numpy.memmap``; the
            build reads it in blocks.
        bias
            ``[V]``; zero if None.
        contexts
            Real hidden states ``[n, D]``: at least 64, a few thousand are enough. Without contexts the index codes all
            directions of every row, which is right for any context but slower, and has no graph.
        k
            How many largest logits to measure the effort for.
        precision
            Declared mean share of the k largest in an answer, and share of answers that begin with the largest logit:
            each reaches it, for contexts like those given.
        method
            ``"graph"``, ``"preview"``, ``"screen"``, ``"full"``, or ``"auto"``: for each size of batch the fastest way
            that reaches the precision on held-out contexts. A warning tells if only the full product does.
        rank
            Leading directions of the preview's codes; if None, the build finds it by measurement.
        dram, path
            DRAM that the index may hold, the layer's rows included, and a new directory for it: both, or neither. The
            index reads rows that do not fit from there; the caller may then drop its own. The build itself takes more:
            besides the layer about 14 bytes for each byte of a row's code, see `rank`, and half a GiB.
        full
            A function that computes the full product and selects from it, to measure in place of the index's own.
        seed
            Decides on the held-out contexts, the groups of the others, and the audited calls; 0 to 2**32 - 1.
        audit
            The share of calls of :meth:`topk` that are answered again by the full product, at most 16 states of each;
            calls that are exact by themselves do not count. See :meth:`stats`. It is not stored.
        progress
            Show a progress bar.

        Raises
        ------
        TypeError, ValueError
            If layer, contexts or numbers do not fit; the message names the argument.
        BudgetError
            If `dram` does not hold codes and graph; the message names a sufficient number of bytes. The built index
            stays at `path`, for :meth:`open`.
        """
        if (dram is None) != (path is None):
            raise ValueError(f"dram={dram!r}, path={path!r}: expected both, or neither")
        if dram is not None:
            parse_bytes(dram, "dram")
        layer = check_layer(weight, bias, dtype)
        words, dimension = layer.shape
        k = check_int("k", k, 1, words, "words")
        if not 0 < precision <= 1:
            raise ValueError(f"precision={precision!r}: expected above 0, at most 1")
        precision = float(precision)
        if method not in METHODS:
            raise ValueError(f"method={method!r}: expected one of {', '.join(METHODS)}")
        seed = check_int("seed", seed, 0, 2**32 - 1)
        audited = _check_audit(audit, seed, precision)
        if rank is not None:
            rank = check_int("rank", rank, 1, dimension, "directions")
        states = None if contexts is None else check_hidden("contexts", contexts, dimension)
        if path is not None:
            check_place(Path(path))
        options = BuildOptions(k, precision, method, rank, seed, progress)
        codes, settings, held = build_codes(layer, states, options)
        warn_if_short(settings, method)
        index = cls(DramEngine(codes, layer), settings, method, layer.digest(), audited)
        if method == "auto" and held is not None:
            index.choose(held.hidden, full=full, seed=seed)
        if dram is None or path is None:
            return index
        index.save(path)
        # The built index goes before the opened one comes.
        del index, codes, layer
        return cls.open(path, dram=dram, audit=audit, seed=seed)

    def choose(self, hidden: Floats, *, full: Callable[[Floats], object] | None = None, seed: int = 0) -> None:
        """Measure the fastest way for each size of batch, and take it from now on.

        Parameters
        ----------
        hidden
            Real hidden states ``[n, D]``.
        full
            A function that computes the full product and selects from it, to measure in place of the index's own.
        seed
            Decides on the states that are measured.
        """
        k = self._settings.k
        able = [way for way in WAYS if way != "full" and self._settings.reached.get(way, 0) >= self._settings.precision]
        ways: dict[Method, Callable[[Floats], object]] = {way: partial(self._by, way, k=k) for way in able}
        ways["full"] = full or (lambda states: self._engine.full(states, k))
        self._settings = self._settings.with_(choices=measure_choices(ways, hidden, seed))

    @property
    def shape(self) -> tuple[int, int]:
        """Words and dimension."""
        return self._words, self._dimension

    @property
    def layer(self) -> OutputLayer | None:
        """The layer, if its rows lie in DRAM."""
        return self._engine.layer

    @property
    def settings(self) -> Settings:
        """The measurements of the build."""
        return self._settings

    @property
    def largest_norm(self) -> float:
        """An upper bound of the norms of all rows."""
        return float(self._engine.codes.norms.max())

    @property
    def memory_bytes(self) -> int:
        """DRAM held besides a layer that the caller shares, in bytes; an opened or copied layer counts."""
        return self._engine.memory_bytes

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: sizes, the measurements of the build, and the counts of the reader of stored rows.

        `precision_graph` and the like are those on held-out contexts, by way: the lower of the mean share of the k
        largest logits that an answer holds and the share of answers that begin with the largest.

        The index has compared the norms of `contexts_checked` hidden states with those of the build's contexts;
        `contexts_unlike` of these states lie outside. If many do, the call that finds it warns, once. `audit` says how
        many calls of :meth:`topk` were answered again by the full product: a `share` of them, and the first that were
        found to hold unlike states if the rows lie in DRAM. `precision` is the mean of the last 1,024 of these, between
        `precision_low` and `precision_high` with a chance of 95 %, whatever their distribution. The call by which this
        interval falls below the declared precision warns, once.

        `walks_compared` is the same of calls by the graph of which the preview has answered up to four states again:
        the first 64 states, one call of 256 in the mean from then on, and up to 512 more while they find less than
        declared. The call by which their precision, and two standard errors, is less warns, once. A word that both miss
        does not count: `audit` counts it. A refresh that changes rows begins anew.
        """
        codes, settings = self._engine.codes, self._settings
        return {
            "words": self._words,
            "dimension": self._dimension,
            "width": codes.blocks.width,
            "degree": 0 if codes.graph is None else codes.graph.links.shape[1],
            "memory_bytes": self.memory_bytes,
            "rows_in_dram": self._engine.layer is not None,
            "contexts_checked": self._familiarity.checked,
            "contexts_unlike": self._familiarity.unlike,
            "audit": self._audit.stats(),
            "walks_compared": self._walk_audit.stats(),
            "choices": dict(settings.choices) if self._method == "auto" else {1: self._method},
            **{f"precision_{way}": reached for way, reached in settings.reached.items()},
            **self._engine.stats(),
        }

    def way(self, batch: int) -> Method:
        """Return the way that a batch of this size takes."""
        return way_for(self._settings.choices, batch) if self._method == "auto" else self._method

    def scan_pays(self, batch: int, k: int) -> bool:
        """Say if a scan for the k largest of each state of a batch costs less than the full product, by counts."""
        return self._ranking_pays(batch, self._settings.limit(k, self._words, HEAD), self._engine.codes.blocks.width)

    def proof_pays(self, batch: int) -> bool:
        """Say if proofs cost less than the full product, by counts of the build; a method other than auto says yes."""
        asked, pays = self._proof_paid  # mostly of the same batch
        if asked != batch:
            layer, settings = self._engine.layer, self._settings
            pays = layer is None or self._method != "auto"
            if layer is not None and not pays:
                row_bytes, width = layer.weight.itemsize * self._dimension, self._engine.codes.blocks.width
                pays = proof_costs_less(batch, self.shape, row_bytes, width, settings.proof_rows, settings.unproven)
            self._proof_paid = batch, pays
        return pays

    def proven_of(self, states: Floats, logits: Floats, k: int) -> TopK:
        """Return the k largest of a full product, proven where no rounding can bring another word among them.

        Parameters
        ----------
        states
            float32 ``[n, D]``.
        logits
            All of them, float32 ``[n, V]``, as the layer in DRAM computes them.
        """
        assert isinstance(self._engine, DramEngine)
        return self._engine.prove(states, k, logits)

    def settle(self, states: Floats, found: TopK, among: Allowed | None = None) -> Ints:
        """Answer doubtful states of a batch again that have ties within rounding; return those left, int64.

        In their places in `found` come the k largest of twice as many words that are proven to be the largest. The full
        product is left one state alone, and states of a layer whose products are rounded.
        """
        assert found.proven is not None
        doubtful = np.flatnonzero(~found.proven)
        if not len(doubtful) or len(states) == 1 or self.layer is None or self.layer.dtype != "float32":
            return doubtful
        k = found.values.shape[1]
        limit, twice = self._settings.limit(2 * k, self._words, CERTIFY_LIMIT), min(2 * k, self._words)
        again = self._engine.certify(states[doubtful], twice, limit, None if among is None else among.of(doubtful))
        assert again.proven is not None
        settled = doubtful[again.proven]
        found.values[settled], found.indices[settled] = again.values[again.proven, :k], again.indices[again.proven, :k]
        return doubtful[~again.proven]

    def topk(
        self,
        hidden: npt.ArrayLike,
        k: int | None = None,
        *,
        allowed: npt.ArrayLike | Sequence[npt.ArrayLike] | None = None,
        certify: bool = False,
        complete: bool = False,
        method: Method | None = None,
    ) -> TopK:
        """Return the k largest logits of each hidden state, of all words or of those allowed.

        Parameters
        ----------
        hidden
            ``[n, D]``, or ``[D]`` for one.
        k
            1 to V; the build's k if None.
        allowed
            Words that an answer may hold; its dtype tells the form. bool: a mask ``[V]`` or ``[n, V]``. int32: bits,
            lowest first, ``[ceil(V / 32)]`` or ``[n, ceil(V / 32)]``, as grammar engines fill them; bits beyond V do
            not count. int64, or a list of integers: ids ``[c]``; a list of n lists or arrays: the ids of each state. If
            they are few, the index computes only their logits, whatever the method: the answer is exact and proven. If
            they are many, it finds the largest with the declared precision. An answer with fewer than k allowed words
            ends with index -1 and minus infinity.
        certify
            Say of each state if its answer is proven; takes the preview with bounds instead of any other method.
        complete
            With `certify`: answer states without a proof by the full product, or in a batch of a float32 layer by the
            largest of more words that have a proof, right but for ties within rounding; `proven` stays False for these.
            If the full product of a float32 layer costs less for the batch, by the counts of the build and with
            ``method="auto"``, it answers, and proves all but ties within rounding.
        method
            Another way than the build's.

        Raises
        ------
        TypeError, ValueError
            If `hidden` does not fit the layer or holds NaN, or `k` is above the vocabulary; if `allowed` has another
            form, an id is out of range, or a state has no allowed word.
        """
        states = check_hidden("hidden", hidden, self._dimension)
        wanted = self._settings.k if k is None else check_int("k", k, 1, self._words, "words")
        if method is not None and method not in METHODS:
            raise ValueError(f"method={method!r}: expected one of {', '.join(METHODS)}")
        among = None if allowed is None else check_allowed(allowed, len(states), self._words)
        if among is not None and method != "full" and self._listing_pays(len(states), wanted, among):
            return self._engine.listed(states, wanted, among, prove=certify)
        way = method if method is not None and method != "auto" else self._way_to(len(states), wanted)
        if way == "full" and not certify:
            return self._full(states, wanted, among)
        walk = None if certify else self._walk_of(way, wanted, among)
        if walk is not None:
            found = self._engine.walk(states, wanted, walk, among, complete=self._completed)
        else:
            found = (
                self._certified(states, wanted, complete, among) if certify else self._by(way, states, wanted, among)
            )
        walked = walk is not None
        self._rest[walked] -= 1
        unlike = self._rest[walked] < 0 and self._watch(states, found, among, walked)
        if (unlike or self._audit.share) and self._audit.draw(unlike=unlike):
            self._answer_again(states, found, among, self._full, self._audit.note, STATES_MOST)
        return found

    def _watch(self, states: Floats, found: TopK, among: Allowed | None, walked: bool) -> bool:
        """Compare states and a walk's answer; say if the states are unlike the build's, and decide on the next call."""
        unlike = self._familiarity.check(states) and self._engine.layer is not None
        if walked and self._walk_audit.due():
            self._answer_again(states, found, among, self._previewed, self._walk_audit.note, WALKS_MOST)
        settled = self._familiarity.settled and (self._walk_audit.settled or not walked)
        self._turns += settled
        self._rest[walked] = pause_after(self._turns) if settled else 0
        return unlike

    def _answer_again(
        self, states: Floats, found: TopK, among: Allowed | None, by: Callable[..., TopK], note: Callable[..., None],
        most: int,
    ) -> None:  # fmt: skip
        """Answer at most so many states of a call in a better way, too, and count the share that the call found."""
        numbers = np.arange(0, len(states), max(1, len(states) // most))[:most]
        if not len(numbers):
            return
        again = states[numbers]
        exact = by(again, found.values.shape[1], None if among is None else among.of(numbers))
        values = np.where(exact.indices >= 0, exact.values, 0)
        largest, norms = np.abs(values).max(1), np.linalg.norm(again, axis=1)
        slack = 1e-5 * np.maximum(1, largest) + 1e-6 * self.largest_norm * norms
        note(TopK(found.values[numbers], found.indices[numbers]), exact, slack)

    def logits(self, hidden: npt.ArrayLike) -> Floats:
        """Return all logits, float32 ``[n, V]``: the full product of hidden states ``[n, D]``."""
        return self._engine.all_logits(check_hidden("hidden", hidden, self._dimension))

    def partition(self, hidden: npt.ArrayLike, *, temperature: float = 1.0) -> Partition:
        """Return log Z of each hidden state: the largest 256 logits exact, the others by their estimates.

        The bounds are proven. The estimate takes the part of a logit outside the codes as normal with its variance.

        Parameters
        ----------
        hidden
            ``[n, D]``, or ``[D]`` for one.
        temperature
            Divides logits.
        """
        if not temperature > 0:
            raise ValueError(f"temperature={temperature!r}: expected above 0")
        states = check_hidden("hidden", hidden, self._dimension)
        self._familiarity.look(states)
        return self._engine.partition(states, 1, min(self._words, HEAD), inverse=1 / temperature)[1]

    def distribution(
        self, hidden: npt.ArrayLike, k: int | None = None, *, temperature: float = 1.0
    ) -> tuple[TopK, Partition]:
        """Return the k largest logits and an estimate of log Z from one scan; the bounds of log Z are infinite.

        ``exp(values / temperature - estimate)`` are probabilities among all words.

        Parameters
        ----------
        hidden, k
            As in :meth:`topk`.
        temperature
            Divides logits in Z, but not the returned ones.
        """
        if not temperature > 0:
            raise ValueError(f"temperature={temperature!r}: expected above 0")
        states = check_hidden("hidden", hidden, self._dimension)
        wanted = self._settings.k if k is None else check_int("k", k, 1, self._words, "words")
        self._familiarity.look(states)
        limit = self._settings.limit(wanted, self._words, HEAD)
        return self._engine.partition(states, wanted, limit, inverse=1 / temperature, interval=False)

    def draws_pay(self, batch: int, limit: int, *, all_directions: bool = False) -> bool:
        """Say if :meth:`envelope` of a batch costs less than the full product; a method other than auto decides it.

        With `all_directions`, that of :meth:`with_all_directions`.
        """
        if self._method != "auto":
            return self._method != "full"
        width = self._dimension if all_directions else self._engine.codes.blocks.width
        return self._ranking_pays(batch, min(limit, self._words), width)

    def with_all_directions(self) -> Self:
        """Return an index of the same layer whose codes have all directions, for tight bounds.

        Raises
        ------
        ValueError
            If the rows lie on SSD.
        """
        codes, layer = self._engine.codes, self._engine.layer
        if layer is None:
            raise ValueError("rows lie on SSD: expected them in DRAM; open the index without dram=")
        blocks = encode(layer, codes.projection, len(codes.projection.turn))
        wide = replace(codes, blocks=blocks, rows=None, graph=None, digits=None)
        return type(self)(DramEngine(wide, layer), self._settings, "preview", self.digest)

    def envelope(
        self,
        hidden: npt.ArrayLike,
        limit: int,
        shape: Shape = AS_IS,
        *,
        out: npt.NDArray[np.int64] | None = None,
    ) -> Envelope:
        """Return exact logits of the highest proven bounds, and the sum of exp of all other bounds.

        Parameters
        ----------
        hidden
            ``[n, D]``, or ``[D]`` for one.
        limit
            How many of the highest bounds.
        shape
            A cap and a factor of logits.
        out
            int64 ``[n, c]``: rows to leave out; -1 for none.
        """
        states = check_hidden("hidden", hidden, self._dimension)
        self._familiarity.look(states)
        return self._engine.envelope(states, min(limit, self._words), shape, out)

    def draw(self, hidden: npt.ArrayLike, request: DrawRequest) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Draw words from the softmax of all logits without the full product.

        Parameters
        ----------
        hidden
            ``[n, D]``, or ``[D]`` for one.

        Returns
        -------
        tuple
            A word of each state, int64 ``[n]``, and whether it is the draw. If not, it is undecided whether the
            truncation keeps the word. If it does, the word is the draw; otherwise, and for -1, any draw from the words
            kept is one.
        """
        states = check_hidden("hidden", hidden, self._dimension)
        self._familiarity.look(states)
        return self._engine.draw(states, request)

    def logits_of(self, hidden: npt.ArrayLike, rows: npt.NDArray[np.int64]) -> Floats:
        """Return the exact logits of rows ``[n, c]``, float32; `hidden` as in :meth:`logits`."""
        return self._engine.logits_of(check_hidden("hidden", hidden, self._dimension), rows)

    def log_prob(
        self,
        hidden: npt.ArrayLike,
        targets: npt.ArrayLike,
        *,
        allowed: npt.ArrayLike | Sequence[npt.ArrayLike] | None = None,
        exact: bool = False,
    ) -> LogProb:
        """Return the log-probability of one word for each hidden state, among all words or those allowed.

        Parameters
        ----------
        hidden
            ``[n, D]``, or ``[D]`` for one.
        targets
            Integers ``[n]``, 0 to V - 1.
        allowed
            As in :meth:`topk`: all other words have the probability zero, whose logarithm is minus infinity.
        exact
            Take log Z from the full product, for scores that agree with a model's own to the last digits.
        """
        states = check_hidden("hidden", hidden, self._dimension)
        names = np.asarray(targets)
        if names.shape != (len(states),) or names.dtype.kind not in "iu":
            raise ValueError(f"targets: expected integers [{len(states)}], got {names.dtype} {list(names.shape)}")
        if names.size and (int(names.min()) < 0 or int(names.max()) >= self._words):
            raise ValueError(f"targets: expected 0 to {self._words - 1}, got {int(names.min())} to {int(names.max())}")
        among = check_allowed(allowed, len(states), self._words)
        if among is not None and self._listing_pays(len(states), HEAD, among):
            z = self._listed_partition(states, among)
        elif exact:
            z = self._full_partition(states, among)
        else:
            self._familiarity.look(states)
            _, z = self._engine.partition(states, 1, min(self._words, HEAD), allowed=among)
        rows = names.astype(np.int64)[:, None]
        found = self._engine.logits_of(states, rows)
        slack = logit_error(states, rows, found, self._engine.codes.norms)[:, 0]
        logits = found[:, 0].astype(np.float64)
        if among is not None:
            logits[~among.holds(rows[:, 0])] = -np.inf
        return LogProb(logits - z.estimate, logits - slack - z.high, np.minimum(0, logits + slack - z.low))

    def is_stale(
        self, weight: npt.NDArray[Any], bias: npt.ArrayLike | None = None, *, dtype: str | None = None
    ) -> bool:
        """Say if the hash of a layer differs from the indexed layer's; arguments as in :meth:`build`."""
        return check_layer(weight, bias, dtype).digest() != self.digest

    @shielded
    def refresh(self, weight: npt.NDArray[Any], bias: npt.ArrayLike | None = None, *, dtype: str | None = None) -> int:
        """Take over a layer of the same shape after training; return how many of its rows have changed.

        The index finds the changed rows by their hashes, and codes and links only these again. Directions and effort,
        which it learned from contexts, stay. The bounds hold for the new rows. An index with its rows on SSD answers
        from the given layer, in DRAM, from then on.

        Parameters
        ----------
        weight, bias, dtype
            As in :meth:`build`.

        Raises
        ------
        TypeError, ValueError
            If the layer has another shape than the indexed one, or does not fit.
        """
        layer = check_layer(weight, bias, dtype)
        if layer.shape != self.shape:
            raise ValueError(f"weight: expected shape {list(self.shape)} as the index has, got {list(layer.shape)}")
        codes, changed = encode_again(self._engine.codes, layer)
        engine = DramEngine(codes, layer)
        engine.keep(self._settings.candidates_most)  # before other threads see it
        before, self._engine, self.digest = self._engine, engine, layer.digest()
        before.close()
        self._proof_paid = -1, True
        if changed:
            self._walk_audit, self._rest = copy(self._walk_audit), [0, 0]
        return changed

    def save(self, path: str | PathLike[str]) -> None:
        """Write codes, settings and the layer's rows into the new directory `path`, or to a URL, all or nothing.

        For a URL they are written into a temporary directory first, and then pushed; see :meth:`memhier.Store.push`.
        """
        save_index(path, self._engine, self._settings, self._method, self.digest)

    @classmethod
    @shielded_giving(close_made)
    def open(
        cls,
        path: str | PathLike[str],
        *,
        dram: int | str | None = None,
        verify: Verify = "read",
        cache: str | PathLike[str] | None = None,
        cache_bytes: int | str = CACHE_BYTES,
        audit: float = 0.0,
        seed: int = 0,
    ) -> Self:
        """Open an index that :meth:`save` wrote, at a path or a URL.

        Parameters
        ----------
        dram
            DRAM that the index may hold, with the workspaces of calls from one thread at a time. Answers, and the
            candidates of more than the build's k, come on top. None loads the layer's rows as well. If a budget does
            not hold the rows, they stay on SSD: a call reads the rows that it needs once for the whole batch, as many
            at a time as the budget has room for. Full products of rows in DRAM take some hundred MB besides.
        verify
            The time to compare pages with their checksums; see :meth:`memhier.Store.open`.
        cache, cache_bytes
            The directory on SSD that keeps pages read from a URL, and the most that they take there; see
            :meth:`memhier.Store.open`.
        audit, seed
            The share of calls that are answered again by the full product, and the seed that draws them; see
            :meth:`build`. For rows on SSD each of them reads all rows.

        Raises
        ------
        FileNotFoundError, FormatError, CorruptionError
            If there is no index at `path`, or it is damaged.
        BudgetError
            If `dram` does not hold codes and graph; the message names a sufficient number of bytes.
        """
        budget = None if dram is None else parse_bytes(dram, "dram")
        seed = check_int("seed", seed, 0, 2**32 - 1)
        _check_audit(audit, seed, 1.0)
        engine, settings, method, digest = open_index(path, budget, verify, cache, cache_bytes)
        return cls(engine, settings, method, digest, _check_audit(audit, seed, settings.precision))

    @shielded
    def close(self) -> None:
        """Release the files of an index with its rows on SSD; another holds none. May be called twice."""
        self._engine.close()

    def _ranking_pays(self, batch: int, rows: int, width: int) -> bool:
        """Say if a scan of codes of a width that ranks so many rows exactly costs less than the full product."""
        if self._engine.layer is None:
            return True
        return not full_costs_less(batch, self._words, self._dimension, width, rows)

    def _listing_pays(self, batch: int, k: int, among: Allowed) -> bool:
        """Say if the logits of the allowed words alone cost less than a scan, or as few reads as log Z."""
        layer, settings = self._engine.layer, self._settings
        if not batch:
            return False
        if layer is None:
            return int(among.counts.max()) <= HEAD
        listed = int(among.counts[0]) * batch if among.shared else int(among.counts.sum())
        row_bytes, width = layer.weight.itemsize * self._dimension, self._engine.codes.blocks.width
        return listed_costs_less(listed, batch, self._words, row_bytes, width, settings.limit(k, self._words))

    def _listed_partition(self, states: Floats, among: Allowed) -> Partition:
        found = self._engine.listed(states, int(among.counts.max()), among)
        error = logit_error(states, found.indices, found.values, self._engine.codes.norms)
        z, low, high = (np.logaddexp.reduce(found.values + sign * error, axis=1) for sign in (0, -1, 1))
        return _widened(z, low, high)

    def _full_partition(self, states: Floats, among: Allowed | None = None) -> Partition:
        mask = None if among is None else among.mask()
        three = np.full((3, len(states)), -np.inf)
        for start in range(0, len(states), _FULL_BLOCK):
            block = states[start : start + _FULL_BLOCK]
            sums = three[:, start : start + len(block)]
            for first, logits in self._engine.logit_blocks(block):
                rows = np.arange(first, first + logits.shape[1])[None]
                error = logit_error(block, rows, logits, self._engine.codes.norms)
                if mask is not None:
                    own = mask if len(mask) == 1 else mask[start : start + len(block)]
                    logits = np.where(own[:, first : first + logits.shape[1]], logits, -np.inf)
                for sign, so_far in zip((0, -1, 1), sums, strict=True):
                    so_far[:] = np.logaddexp(so_far, np.logaddexp.reduce(logits + sign * error, axis=1))
        return _widened(*three)

    def _way_to(self, batch: int, k: int) -> Method:
        """Return the way for a batch: the build's for its k, and for a larger one the way that costs less."""
        more = self._method == "auto" and k > self._settings.k
        return "full" if more and not self.scan_pays(batch, k) else self.way(batch)

    def _by(self, way: Method, states: Floats, k: int, among: Allowed | None = None) -> TopK:
        walk = self._walk_of(way, k, among)
        if walk is not None:
            return self._engine.walk(states, k, walk, among, complete=self._completed)
        if way == "full" or k == self._words:
            return self._full(states, k, among)
        return self._previewed(states, k, among)

    def _walk_of(self, way: Method, k: int, among: Allowed | None) -> Walk | None:
        """Return the walk of a way; None without a graph, or among few words, where the preview answers."""
        walk = self._walks.get(way) if k <= self._most_walked else None
        if among is None or walk is None:
            return walk
        many = int(among.counts.min(initial=0)) >= _WALKED * self._words
        return self._settings.walk(way, among=True) if many else None

    def _full(self, states: Floats, k: int, among: Allowed | None) -> TopK:
        return self._engine.full(states, k) if among is None else full_among(self._engine, states, k, among)

    def _completed(self, states: Floats, k: int, among: Allowed | None, found: TopK) -> TopK:
        """Answer states too far away for a walk, or with too few rows found, by the preview."""
        short = found.indices[:, -1] < 0
        if short.all():
            return self._previewed(states, k, among)
        again = self._previewed(states[short], k, None if among is None else among.of(short))
        found.values[short], found.indices[short] = again.values, again.indices
        return found

    def _previewed(self, states: Floats, k: int, among: Allowed | None) -> TopK:
        limit, coarse = self._settings.preview(k, self._words, self._engine.codes.digits is not None)
        return self._engine.preview(states, k, limit, coarse, among)

    def _certified(self, states: Floats, k: int, complete: bool, among: Allowed | None) -> TopK:
        narrow = self.layer is not None and self.layer.dtype != "float32"  # whose rows NumPy widens for a product
        if complete and among is None and not narrow and not self.proof_pays(len(states)):
            assert isinstance(self._engine, DramEngine)
            return self._engine.full_proven(states, k)
        found = self._engine.certify(states, k, self._settings.limit(k, self._words, CERTIFY_LIMIT), among)
        if complete and len(doubtful := self.settle(states, found, among)):
            exact = self._full(states[doubtful], k, None if among is None else among.of(doubtful))
            found.values[doubtful], found.indices[doubtful] = exact.values, exact.indices
        return found


def _check_audit(share: float, seed: int, declared: float) -> PrecisionAudit:
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ValueError(f"audit={share!r}: expected a share of calls, 0 to 1")
    return PrecisionAudit(float(share), seed, declared)


def _widened(z: Doubles, low: Doubles, high: Doubles) -> Partition:
    slack = 1e-8 * np.maximum(1, np.abs(z))  # the rounding of sums in double precision
    return Partition(z, low - slack, high + slack)
