"""TransitionBuffer: a learner's transitions, the newest in DRAM and all on SSD."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import as_ints, check_int, check_number
from memhier.budget import parse_bytes
from memhier.closing import Closing
from memhier.errors import ClosedError, CorruptionError, FormatError
from memhier.fields import described, stored_array
from memhier.files import Files
from memhier.io.faults import is_unreadable
from memhier.io.reader import Reader
from memhier.recsys.replay.transitions.batch import TransitionBatch
from memhier.recsys.replay.transitions.described import (
    KIND,
    META,
    decode_meta,
    decoded_settings,
    encoded_settings,
)
from memhier.recsys.replay.transitions.drawn import Drawn, Fetcher
from memhier.recsys.replay.transitions.draws import Draw, Draws, Prioritised, Uniform
from memhier.recsys.replay.transitions.layout import Layout
from memhier.recsys.replay.transitions.newest import Newest
from memhier.recsys.replay.transitions.runs import NStep, Runs, Slices, Trajectories, end_fields, flags_of
from memhier.recsys.replay.transitions.settings import Sizes, TransitionSettings, pending_columns
from memhier.recsys.replay.transitions.stored_rows import StoredRows
from memhier.shield import caller, close_made, shielded, shielded_giving, shielded_init
from memhier.store.segments import FullError
from memhier.store.store import Store

__all__ = ["TransitionBuffer"]

Ints = NDArray[np.int64]

_DEPTH = 32  # reads in flight
_BATCH_MAX = 2**20


class TransitionBuffer(Closing):
    """A ring of the newest `capacity` transitions on SSD, drawn from uniformly or by priority, in a budget of DRAM.

    DRAM holds the priorities of all, 4.8 bytes each, a byte each where trajectories matter, and the newest
    transitions. A batch is drawn `ahead` calls before the one that returns it, and a thread reads its transitions from
    SSD meanwhile: the batch of call t has the priorities and transitions of call t - `ahead`, and those of the first
    calls of the first. Batches depend on the calls and the seed alone, not on the budget, the thread or the timing.

    One thread uses a buffer, the one that made it.

    Parameters
    ----------
    path
        Directory to make.
    capacity
        Transitions that stay; a further one replaces the oldest.
    schema
        The fields of a transition: from a name to a dtype, a pair of dtype and shape, or a dict of nested names.
    dram
        Bytes for everything: ``"64MiB"``.
    draw
        `Uniform` or `Prioritised`.
    runs
        `NStep` for n-step returns, `Slices` for slices of trajectories. Transitions of a trajectory are added in
        order, and one trajectory after the other.
    batch
        Transitions of a batch, or slices.
    ahead
        0 draws each batch in the call that returns it.
    ends
        Names of the fields that end a trajectory where they are not zero. By default those named ``terminated``,
        ``truncated`` or ``done``, and of these the ones below ``next`` if there are any; `runs` need one, or ``()``.
    seed
        Of the draws.
    files
        File layer; the operating system's by default.

    Raises
    ------
    BudgetError
        When `dram` is too small; the message names a budget that is enough.
    FileExistsError
        When `path` holds something already.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.recsys.replay.transitions import Prioritised, TransitionBuffer
    >>> schema = {"observation": ("float32", 4), "action": "int64", "next": {"reward": "float32", "done": "bool"}}
    >>> place = tempfile.mkdtemp() + "/replay"
    >>> with TransitionBuffer(place, capacity=1000, schema=schema, draw=Prioritised(), batch=32) as buffer:
    ...     numbers = buffer.add({
    ...         "observation": np.zeros((50, 4), np.float32),
    ...         "action": np.zeros(50, np.int64),
    ...         "next": {"reward": np.zeros(50, np.float32), "done": np.zeros(50, bool)},
    ...     })
    ...     batch = buffer.sample()
    ...     left = buffer.update_priorities(batch.numbers, np.full(32, 0.5))
    ...     generation = buffer.checkpoint()
    >>> batch["observation"].shape, float(batch.weights.max()), left
    ((32, 4), 1.0, 32)
    """

    @shielded_init
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        capacity: int,
        schema: Mapping[str, Any],
        dram: int | str = "64MiB",
        draw: Draw = Uniform(),  # noqa: B008
        runs: Runs | None = None,
        batch: int = 32,
        ahead: int = 2,
        ends: Sequence[str] | None = None,
        seed: int = 0,
        files: Files | None = None,
    ) -> None:
        layout = Layout(schema)
        found = end_fields(list(layout.columns))
        if ends is None and runs is not None and not found:
            raise ValueError(f"ends: no field of {list(layout.columns)} is named 'terminated', 'truncated' or 'done'; "
                             "name those that end a trajectory, or give () if none ever ends")  # fmt: skip
        settings = TransitionSettings(
            layout,
            check_int("capacity", capacity, 1, 2**31),
            draw,
            runs,
            check_int("batch", batch, 1, _BATCH_MAX),
            check_int("ahead", ahead, 0, 1000, "calls"),
            tuple(found if ends is None else ends),
            check_int("seed", seed, 0, 2**63 - 1),
        )
        with ExitStack() as opened:
            reader = opened.enter_context(Reader(depth=_DEPTH))
            sizes = Sizes(settings, parse_bytes(dram), reader.planned_bytes)
            store = opened.enter_context(Store.create(path, KIND, files=files))
            self._set_up(settings, sizes, store, reader, None)
            self._commit(None)
            opened.pop_all()

    def _set_up(
        self, settings: TransitionSettings, sizes: Sizes, store: Store, reader: Reader, meta: dict[str, Any] | None
    ) -> None:
        self._settings = settings
        self._sizes = sizes
        self._store = store
        self._reader = reader
        state: dict[str, Any] = meta or {"stop": 0, "parts": [], "uniforms": 0, "largest": 1.0, "open_steps": 0}
        self._stop: int = state["stop"]
        self._value: str | None = state.get("value")
        row_bytes, slices = settings.layout.row_bytes, settings.slices
        self._stored = StoredRows(store, reader, row_bytes, sizes.part, sizes.run_bytes, state["parts"])
        self._newest = Newest(settings.layout, sizes.newest, self._stop)
        self._fetcher = Fetcher(settings.layout, self._newest, self._stored)
        self._draws = Draws(
            settings.draw, settings.capacity, settings.seed, starts=slices is not None,
            uniforms=state["uniforms"], largest=state["largest"],
        )  # fmt: skip
        self._trajectories = None if settings.runs is None else Trajectories(settings.capacity)
        self._failure: BaseException | None = None
        self._closed = False
        self._pid = os.getpid()
        self._thread = caller()

    @classmethod
    @shielded_giving(close_made)
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        dram: int | str = "64MiB",
        schema: Mapping[str, Any] | None = None,
        files: Files | None = None,
    ) -> Self:
        """Open a buffer as of its last checkpoint, to go on from there: the next batches are those that followed it.

        Parameters
        ----------
        path
            Its directory.
        dram
            As in the constructor; it may be another one than before.
        schema
            The expected fields of a transition.
        files
            As in the constructor.

        Raises
        ------
        FormatError
            If `path` holds something else, or transitions of another schema.
        LockedError
            If another process or buffer has it open.
        """
        with ExitStack() as opened:
            store = opened.enter_context(Store.open(path, KIND, writable=True, files=files))
            meta = decode_meta(store)
            settings = decoded_settings(store.path, meta)
            if schema is not None and Layout(schema) != settings.layout:
                raise FormatError(f"{store.path}: holds the fields {settings.layout.encode()}, expected "
                                  f"{Layout(schema).encode()}")  # fmt: skip
            reader = opened.enter_context(Reader(depth=_DEPTH))
            sizes = Sizes(settings, parse_bytes(dram), reader.planned_bytes)
            self = cls.__new__(cls)
            self._set_up(settings, sizes, store, reader, meta)
            self._restore(meta)
            opened.pop_all()
        return self

    @property
    def capacity(self) -> int:
        """Transitions that stay."""
        return self._settings.capacity

    @property
    def added(self) -> int:
        """Transitions added so far; the number of the next one."""
        return self._stop

    @property
    def oldest(self) -> int:
        """The number of the oldest transition stored."""
        return max(0, self._stop - self._settings.capacity)

    def __len__(self) -> int:
        return self._stop - self.oldest

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes: priorities, newest transitions, batches under way, reader, and catalog."""
        if self._closed:
            return 0
        parts = (self._draws, self._newest, self._fetcher, self._reader, self._store, self._trajectories)
        return sum(part.memory_bytes for part in parts if part is not None)

    @shielded
    def add(self, batch: Mapping[str, Any]) -> Ints:
        """Take transitions in, at once to be drawn; they are durable after `checkpoint`.

        Parameters
        ----------
        batch
            For each field an array ``[n, *shape]`` of its dtype, in nested dicts or by names joined by dots.

        Returns
        -------
        numpy.ndarray
            Their numbers, int64 [n].

        Raises
        ------
        TypeError, ValueError
            For an unfit batch.
        OSError
            When the disk is full. Transitions before `added` are in; make room, and add the others.
        """
        self._check_open()
        count, columns = self._settings.layout.check(batch)
        first = self._stop
        if count == 0:
            return np.empty(0, np.int64)
        ends = None
        if self._trajectories is not None:
            ends = flags_of(columns, self._settings.ends, count)
        for start in range(0, count, self._sizes.run):
            last = min(start + self._sizes.run, count)
            if self._stop + last - start - self._stored.stop > self._sizes.run:
                self._flush()
            number = self._stop
            self._newest.write(columns, start, last)
            self._draws.add(number, number + last - start)
            self._stop += last - start
            if self._trajectories is not None and ends is not None:
                self._draws.allow(self._trajectories.add(number, ends[start:last], self._settings.slices))
        return np.arange(first, self._stop)

    @shielded
    def sample(self, *, beta: float | None = None) -> TransitionBatch:
        """Return the next batch, and draw the one that `ahead` calls from now return.

        Parameters
        ----------
        beta
            Exponent of the weights, in place of that of `Prioritised`.

        Raises
        ------
        ValueError
            When nothing is stored, or no slice is whole.
        OSError
            When transitions could not be read; the next call tries again, but after ``EIO`` it returns the batch after.
        CorruptionError
            When a transition of the batch is damaged; the next call returns the batch after it.
        """
        self._check_open()
        if beta is not None:
            beta = check_number("beta", beta, 0, 10)
        waiting, settings = self._fetcher.waiting, self._settings
        while len(waiting) <= settings.ahead and (not waiting or self._can_draw()):
            waiting.append(self._draw())
        drawn = waiting[0]
        try:
            drawn.complete()
        except (CorruptionError, OSError):
            if drawn.damage is not None:
                waiting.popleft()
            raise
        waiting.popleft()
        return self._finished(drawn, beta)

    @shielded
    def update_priorities(self, numbers: Any, priorities: Any) -> int:
        """Give transitions, or the slices that begin at them, new priorities.

        Those that were replaced meanwhile are left out. Where a number comes twice, its last priority stays.

        Parameters
        ----------
        numbers
            Integers [n]: `TransitionBatch.numbers`.
        priorities
            [n], finite and not negative: such as absolute errors of temporal differences.

        Returns
        -------
        int
            How many were given theirs.
        """
        self._check_open()
        if not isinstance(self._settings.draw, Prioritised):
            raise TypeError(f"update_priorities: the buffer draws by {self._settings.draw}; make it with "
                            "draw=Prioritised()")  # fmt: skip
        which = as_ints("numbers", numbers).reshape(-1)
        values = np.asarray(priorities, np.float64).reshape(-1)
        if len(which) != len(values):
            raise ValueError(f"priorities: expected one for each of the {len(which)} numbers, got {len(values)}")
        if not len(which):
            return 0
        if which.view(np.uint64).max() >= self._stop:  # a negative number is a large one there
            raise ValueError(f"numbers: expected 0 to {self._stop - 1}, got {which.min()} to {which.max()}")
        if not (values.min() >= 0 and values.max() < np.inf):
            at = int(np.flatnonzero(~(np.isfinite(values) & (values >= 0)))[0])
            raise ValueError(f"priorities[{at}]={values[at]}: expected a finite number of at least 0")
        return self._draws.update(which, values, self.oldest)

    @property
    def value(self) -> str | None:
        """The text given to the last checkpoint."""
        return self._value

    @shielded
    def checkpoint(self, value: str | None = None) -> int:
        """Make transitions, priorities and batches drawn ahead durable, all or nothing.

        Parameters
        ----------
        value
            A text of the caller's, such as the step of the training; `value` has it after `open`.

        Returns
        -------
        int
            The generation of the store.

        Raises
        ------
        OSError
            When the disk is full: nothing is lost, make room and call again. After another error the buffer takes no
            more calls; `open` goes back to the last checkpoint.
        """
        self._check_open()
        return self._commit(value)

    def stats(self) -> dict[str, int]:
        """Return plain numbers about the work so far.

        ``stored`` transitions, ``newest`` of them in DRAM; ``rows_read`` from SSD for batches; ``reads`` and
        ``read_bytes`` of the reader; ``ssd_bytes``, of the rows on SSD.
        """
        self._check_open()
        reads = self._reader.stats()
        return {
            "stored": len(self),
            "newest": self._newest.stop - self._newest.start,
            "rows_read": self._fetcher.rows_read,
            "reads": int(reads["reads"]),
            "read_bytes": int(reads["bytes"]),
            "ssd_bytes": self._stored.written_bytes,
        }

    @shielded
    def close(self) -> None:
        """Free all memory; transitions added since the last checkpoint are lost. A second call does nothing."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self._fetcher.close()
        self._stored.close()
        self._reader.close()
        self._store.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the buffer is closed")
        if self._pid != os.getpid():
            raise ClosedError(f"the buffer belongs to process {self._pid}, which forked this one; open another here")
        if self._thread != caller():
            raise RuntimeError("the buffer belongs to the thread that made it, and was called by another")
        if self._failure is not None:
            raise ClosedError(
                f"a write failed ({self._failure!r}); transitions added since the last checkpoint are gone: open it "
                "again"
            ) from self._failure

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Refuse later calls after a write that failed for another reason than a full disk."""
        try:
            yield
        except FullError:
            raise
        except BaseException as error:
            self._failure = error
            raise

    def _flush(self) -> None:
        """Append the transitions that SSD lacks."""
        self._fetcher.complete()
        first, last = self._stored.stop, self._stop
        with self._writing():
            self._stored.drop_before(self.oldest)
            step = max(1, self._sizes.run)
            rows: NDArray[np.uint8] = np.zeros((min(step, last - first), self._settings.layout.row_bytes), np.uint8)
            for start in range(first, last, step):
                count = min(step, last - start)
                self._newest.pack(start, start + count, rows[:count])
                self._stored.append(rows[:count], start)

    def _can_draw(self) -> bool:
        tree = self._draws.tree
        return len(self) > 0 and (self._settings.slices is None or (tree is not None and tree.total > 0))

    def _draw(self) -> Drawn:
        if not self._can_draw():
            there = "nothing is stored" if len(self) == 0 else f"no slice of {self._settings.runs} is whole"
            raise ValueError(f"sample: {there} yet; add transitions first")
        settings, stop = self._settings, self._stop
        numbers, probabilities, ratios = self._draws.take(settings.batch, self.oldest, stop)
        lengths: NDArray[np.int32] = np.ones(settings.batch, np.int32)
        if settings.runs is not None and self._trajectories is not None:
            lengths = self._trajectories.lengths(numbers, settings.runs.length, stop)
        drawn = Drawn(numbers, probabilities, ratios, lengths, {})
        self._fetcher.fill(drawn, self._wanted(numbers, lengths), beside=settings.ahead > 0)
        return drawn

    def _wanted(self, numbers: Ints, lengths: NDArray[np.int32]) -> dict[str, Ints]:
        """Return the numbers of the transitions that each field of a batch comes from."""
        settings = self._settings
        names = list(settings.layout.columns)
        if settings.runs is None:
            return dict.fromkeys(names, numbers)
        every = numbers[:, None] + np.minimum(np.arange(settings.runs.length), lengths[:, None] - 1)
        if isinstance(settings.runs, Slices):
            return dict.fromkeys(names, every)
        reward, of_last = settings.runs.fields(names, settings.ends)
        last = numbers + lengths - 1
        return {name: every if name == reward else last if name in of_last else numbers for name in names}

    def _finished(self, drawn: Drawn, beta: float | None) -> TransitionBatch:
        draw, runs, columns = self._settings.draw, self._settings.runs, drawn.columns
        weights: NDArray[np.float32] = np.ones(len(drawn.numbers), np.float32)
        if isinstance(draw, Prioritised):
            weights = (drawn.ratios ** (draw.beta if beta is None else beta)).astype(np.float32)
        found = TransitionBatch(columns, drawn.numbers, drawn.probabilities, weights, drawn.lengths)
        if isinstance(runs, NStep):
            name, _ = runs.fields(list(columns), self._settings.ends)
            columns[name] = _returns(columns[name], drawn.lengths, runs.discount)
            found.discounts = (runs.discount ** drawn.lengths.astype(np.float64)).astype(np.float32)
        elif isinstance(runs, Slices):
            found.mask = np.arange(runs.length) < drawn.lengths[:, None]
            if runs.padded:
                for values in columns.values():
                    values[~found.mask] = np.zeros((), values.dtype)
        return found

    def _commit(self, value: str | None) -> int:
        self._flush()
        waiting = [drawn for drawn in self._fetcher.waiting if drawn.damage is None]
        meta = encoded_settings(self._settings) | {
            "stop": self._stop,
            "parts": self._stored.table(),
            "uniforms": self._draws.taken,
            "largest": self._draws.largest,
            "open_steps": 0 if self._trajectories is None else self._trajectories.open_steps,
            "waiting": [len(drawn.numbers) for drawn in waiting],
            "value": value,
        }
        segments: dict[str, list[NDArray[Any]]] = {}
        stored = min(self._stop, self._settings.capacity)
        if self._draws.tree is not None and stored:
            segments["priorities"] = [self._draws.tree.leaves[:stored]]
        if self._trajectories is not None and stored:
            segments["ends"] = [self._trajectories.ends[:stored]]
        if waiting:
            segments["waiting"] = [values for drawn in waiting for values in drawn.arrays()]
        with self._writing():
            generation = self._stored.commit(segments, META, json.dumps(meta).encode())
        self._value = value
        return generation

    def _restore(self, meta: dict[str, Any]) -> None:
        """Bring back priorities, batches drawn ahead, and the newest transitions."""
        store, settings = self._store, self._settings
        stored = min(self._stop, settings.capacity)
        if self._draws.tree is not None and stored:
            self._draws.restore(stored_array(store, "priorities", np.float32, (stored,)), store.path)
        if self._trajectories is not None and stored:
            ends = stored_array(store, "ends", np.uint8, (stored,))
            self._trajectories.restore(ends != 0, meta["open_steps"])
        if meta["waiting"]:
            raw = stored_array(store, "waiting", np.uint8, (-1,))
            most = 1 if settings.runs is None else settings.runs.length
            with described(f"{store.path}: the batches drawn ahead"):
                for count in meta["waiting"]:
                    drawn, raw = Drawn.decode(raw, count, pending_columns(settings, count))
                    drawn.check(self._stop, most)
                    self._fetcher.waiting.append(drawn)
                if len(raw):
                    raise ValueError(f"{len(raw)} bytes more than the batches have")
        self._load_newest()

    def _load_newest(self) -> None:
        """Read the newest transitions into DRAM."""
        first = max(self.oldest, self._stop - self._sizes.newest)
        self._newest.begin(first)
        for start in range(first, self._stop, self._sizes.run):
            numbers = np.arange(start, min(start + self._sizes.run, self._stop))
            try:
                rows = self._stored.read(self._stored.place(numbers))
            except (CorruptionError, OSError) as error:
                if not is_unreadable(error):
                    raise
                # The others can be read all the same; the batch that draws a damaged one tells.
                self._newest.begin(start + len(numbers))
                continue
            columns = {name: self._settings.layout.unpack(rows, name) for name in self._settings.layout.columns}
            self._newest.write(columns, 0, len(numbers))


def _returns(rewards: NDArray[Any], lengths: NDArray[np.int32], discount: float) -> NDArray[Any]:
    """Return the discounted sums of the first `lengths` rewards, [n, steps, *shape] -> [n, *shape].

    Those of integers are float32.
    """
    total: NDArray[np.float64] = np.zeros((len(rewards), *rewards.shape[2:]))
    each = (len(rewards),) + (1,) * (rewards.ndim - 2)
    for step in range(rewards.shape[1]):
        total += np.where((lengths > step).reshape(each), discount**step * rewards[:, step].astype(np.float64), 0.0)
    return total.astype(rewards.dtype if rewards.dtype.kind == "f" else np.float32)
