"""CarouselBuffer: the memory of a learner, most of it on SSD (Carousel Memory, arXiv 2110.07276)."""

import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import as_ints, check_int, check_number, check_range
from memhier.closing import Closing
from memhier.errors import BudgetError, ClosedError
from memhier.fields import described
from memhier.files import Files
from memhier.recsys.replay.ahead import BatchQueue
from memhier.recsys.replay.batch import Batch, room
from memhier.recsys.replay.codecs.encoding import check_storage_codecs
from memhier.recsys.replay.division import Buffers
from memhier.recsys.replay.placement.admit import Admission, Reservoir
from memhier.recsys.replay.placement.memory import Memory
from memhier.recsys.replay.placement.named import admission, stored_admission
from memhier.recsys.replay.placement.placement import Decisions, Members, Placement
from memhier.recsys.replay.policies import SwapPolicy, encoded_policy, stored_policy, swap_policy
from memhier.recsys.replay.reader import MemoryReader
from memhier.recsys.replay.schema import Columns, Schema, as_array, check_update
from memhier.recsys.replay.settings import CODES, BufferSettings, Tiers, as_schema, stored_schema
from memhier.recsys.replay.storage.described import VERSION
from memhier.recsys.replay.storage.room import ENTRY_BYTES
from memhier.recsys.replay.storage.storage import KIND, META, Storage
from memhier.recsys.replay.stored import StoredSamples
from memhier.recsys.replay.streams import Purpose, Uniforms, stream
from memhier.recsys.replay.swapper import Swapper
from memhier.shield import after_shielded, caller, close_made, set_at_once, shielded, shielded_giving, shielded_init
from memhier.store.store import Finding, Store, Transfer
from memhier.store.way_back import go_back

__all__ = ["CarouselBuffer"]

Ints = NDArray[np.int64]
Where = Mapping[str, Any] | Callable[[Ints, Ints], NDArray[np.bool_]]

_USER = "user/"


class _Closable(Protocol):
    def close(self) -> None: ...


@contextmanager
def _closing_on_error(part: _Closable) -> Iterator[None]:
    """Close a part on an error; else its store stays locked for as long as the error is looked at."""
    try:
        yield
    except BaseException:
        part.close()
        raise


class CarouselBuffer(Closing):
    """Every sample on SSD, a small working set of them in DRAM that swaps change while training runs.

    A training step is `sample`, the computing, `feedback`. `feedback` ends the step: it chooses which of the used
    samples leave memory, and a thread reads their replacements while the next step computes. A swap decided in step t
    is visible from the end of step t + `delay` on, whatever the I/O does: the samples of a step depend on the seed and
    the calls alone, in a resumed run as well.

    One thread uses a buffer: the thread that made it. Other threads and processes read memory through a `reader`.

    Parameters
    ----------
    path
        A directory to make; `open` opens an existing one.
    memory
        Size of the memory tier: samples as an int, or bytes as text: ``"64MiB"``, within which the whole buffer stays:
        samples, slots, the index of storage, reader, logs and swaps. Batches drawn ahead and the samples of a call come
        on top; and, without a limit of storage, its index, 44 to 104 bytes for each stored sample. `memory_bytes`
        counts everything.
    storage
        Size of the storage tier: samples as an int, bytes as text, or None for no limit. The tier never exceeds a limit
        in bytes, with checkpoints or without. It has room for each sample twice: as of the last checkpoint, to which a
        crash goes back, and as it is now (once with ``admit="everything"``, except for mutable fields). A sample of
        variable packed size counts with the largest size that it may have, unless its `Field` has a `mean`: then
        storage holds as many samples as fit by their own bytes, at most as many as of that length. If samples turn out
        longer, others leave, drawn at random; the limit becomes the number of those left, as after `resize`. Batches
        drawn ahead and the values given to `checkpoint` come on top. ``stats()["storage_limit"]`` is the limit in
        samples.
    schema
        The fields of a sample: a `Schema`, or its argument.
    admit
        Decides which samples storage keeps, and which of them enter memory: ``"reservoir"``, ``"class_balanced"``,
        ``"ring"`` or ``"everything"``; `Balanced` for shares or quotas of classes, tasks or clusters; `Weighted` to
        keep samples of large loss or uncertainty more often. See `memhier.recsys.replay.placement.admit`.
    swap
        ``"random"``, ``"deck"``, ``"gate"``, ``"loss"`` or ``"age"`` with a ratio of one half, a policy such as
        ``RandomSwap(0.2)``, or None: only admission changes memory then.
    codec
        The codec of each field in storage alone, by name: ``"none"`` by default, ``"fp16"``, ``"bf16"`` or ``"int8"``
        for float32, ``"zstd"``, and for images ``"jpeg"`` or ``"webp"``, also with a quality: ``"jpeg:75"``, or without
        loss ``"png"``, ``"webp:lossless"``, ``"lossless"``: the smaller one of these two, or ``"jxl"``. A `Field` has a
        codec for both tiers.
    seed
        0 to 2**63 - 1.
    delay
        Steps from a swap's decision to its arrival. 0 waits for the reads in `feedback`.
    same_class
        Whether a sample that comes in is of the class of the sample that leaves, so that only admission changes the
        classes in memory. By default with ``admit="class_balanced"`` only, and while there are no more classes than
        slots: otherwise swaps bring any sample, and every class in turn. CarM's methods ask for True, and so do
        frameworks that read the labels of slots only once, such as Avalanche.
    way_back
        Whether a checkpoint keeps the one before it, for `go_back`. Storage has room for each sample three times then.
    files
        File layer; the operating system's by default.

    Raises
    ------
    FileExistsError
        If `path` exists.
    BudgetError
        If a budget is too small for one sample.
    TypeError, ValueError
        For an unfit argument.
    RuntimeError
        From every call that uses or changes the buffer, on any thread but the one that made it.

    Examples
    --------
    >>> import pathlib
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.recsys import CarouselBuffer
    >>> place = pathlib.Path(tempfile.mkdtemp()) / "replay"
    >>> with CarouselBuffer(place, memory=4, schema={"x": ("float32", 2)}, seed=1) as buffer:
    ...     _ = buffer.add({"x": np.arange(20, dtype=np.float32).reshape(10, 2)}, labels=np.arange(10) % 2)
    ...     for _ in range(3):
    ...         batch = buffer.sample(2)
    ...         buffer.feedback(batch)
    ...     buffer.stats()["storage_samples"], buffer.stats()["memory_samples"], batch["x"].shape
    (10, 4, (2, 2))
    """

    @shielded_init
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        memory: int | str,
        storage: int | str | None = None,
        schema: Schema | Mapping[str, Any],
        admit: str | Admission = "reservoir",
        swap: str | SwapPolicy | None = "random",
        codec: Mapping[str, str] | None = None,
        seed: int = 0,
        delay: int = 1,
        same_class: bool | None = None,
        way_back: bool = False,
        files: Files | None = None,
    ) -> None:
        schema, kept = as_schema(schema), admission(admit)
        if kept.by_class and same_class is False:
            raise ValueError(f"same_class=False: admit={kept.name!r} is about classes; expected True or None")
        if kept.beside == "group" and same_class:
            raise ValueError(f"same_class=True: swaps keep the groups of {kept.by!r}; expected None")
        kept.check_schema(schema)
        seed, delay = check_int("seed", seed, 0, 2**63 - 1), check_int("delay", delay, 0, 1000, "steps")
        if codec is not None and not isinstance(codec, Mapping):
            raise TypeError(f"codec={codec!r}: expected a dict from fields to codecs, such as {{'image': 'jpeg:90'}}")
        check_storage_codecs(schema, codec or {})
        settings = BufferSettings(schema, dict(codec or {}), kept, swap_policy(swap), seed, delay, same_class, way_back)
        tiers = settings.tiers(memory, storage)
        tier = Storage.create(path, settings.held, settings.codecs, tiers.limit is not None, files, tiers.buffers)
        with _closing_on_error(tier):
            self._set_up(settings, tier, tiers)
            self._commit({f"{CODES}{name}": codes.value for name, codes in settings.codes.items()})
            tier.keep_way_back(way_back)

    def _set_up(self, settings: BufferSettings, storage: Storage, tiers: Tiers) -> None:
        self._settings = settings
        self._storage = storage
        self._dram, self._rated = tiers.dram, tiers.rated
        at_once = tiers.buffers.stored is not None
        kept = settings.admission
        self._placement = Placement(
            settings.seed, tiers.slots, tiers.limit, settings.by_class, at_once, beside=kept.beside,
            weights=kept.weights,
        )  # fmt: skip
        self._memory = Memory.make(settings.held, tiers.slots)
        self._ahead = BatchQueue(settings.encoding, self._placement)
        self._swapper = Swapper(settings, storage, self._placement, self._memory, self._ahead)
        self._draws = Uniforms(settings.seed, Purpose.SAMPLE)
        self._failure: BaseException | None = None
        self._closed = False
        self._pid = os.getpid()
        self._thread = caller()
        self._thread_name = _name_of(self._thread)
        self._bound_storage()

    @classmethod
    @shielded_giving(close_made)
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        memory: int | str | None = None,
        swap: SwapPolicy | None = None,
        admit: str | Admission | None = None,
        schema: Schema | Mapping[str, Any] | None = None,
        files: Files | None = None,
    ) -> Self:
        """Open a buffer as of its last checkpoint, to go on from there.

        A damaged sample of memory leaves it, with a warning that names its id.

        Parameters
        ----------
        path
            Its directory.
        memory
            Another size of the memory tier, as by `resize`.
        swap, admit
            Required if the buffer had ones of the caller's own, which a checkpoint cannot hold; others replace them.
        schema
            The expected fields of a sample.

        Raises
        ------
        FormatError
            If `path` holds something else, or samples of another schema.
        LockedError
            If another process or buffer has it open.
        """
        store, meta = Storage.open_store(path, writable=True, files=files)
        limit, dram = meta["tiers"]["limit"], meta.get("dram")
        with _closing_on_error(store):
            there = stored_schema(store, meta, schema)
            policy = stored_policy(meta["swap"], swap, store.path)
            kept = stored_admission(meta, admit, there, path)
            settings = BufferSettings(
                there, meta["codecs"], kept, policy, meta["seed"], meta["delay"], meta["same_class"],
                meta.get("way_back", False),
            )  # fmt: skip
            there_are = Tiers(meta["slots"], limit, dram, Buffers() if dram is None else Buffers.within(dram, limit),
                              meta.get("rated"))  # fmt: skip
            tiers = there_are if memory is None else settings.tiers(memory, None, limit)
            with described(f"{path}: the samples"):
                storage = Storage(store, settings.held, settings.codecs, limit is not None, tiers.buffers)
        self = cls.__new__(cls)
        with _closing_on_error(storage):
            self._set_up(settings, storage, replace(tiers, slots=there_are.slots, rated=there_are.rated))
        with _closing_on_error(self):
            self._restore(meta)
            storage.keep_way_back(settings.way_back)
            if tiers.slots != self.capacity:
                self._resize_memory(tiers.slots)
        return self

    @staticmethod
    @shielded
    def go_back(path: str | os.PathLike[str]) -> None:
        """Take a closed buffer back from its last checkpoint to the one before, if it was made with ``way_back=True``.

        For a run whose model has no checkpoint as new as the buffer's. One step back is possible.

        Raises
        ------
        ValueError
            When the last checkpoint kept no way back.
        """
        store, _ = Storage.open_store(path, writable=True)
        with store:
            go_back(store)

    @shielded
    def close(self) -> None:
        """Free all memory; samples added since the last checkpoint are lost. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._swapper.close()
        self._storage.close()
        self._memory.close()

    def _check_open(self, writing: bool = False, using: bool = False) -> None:
        if self._closed:
            raise ClosedError("the buffer is closed")
        if writing and self._pid != os.getpid():
            raise ClosedError(f"the buffer belongs to process {self._pid}, which forked this one; use buffer.reader()")
        if (writing or using) and self._thread != caller():
            raise RuntimeError(
                f"the buffer belongs to thread {self._thread_name!r}, which made it, and was called by thread "
                f"{_name_of(caller())!r}: one thread uses it; others read memory through buffer.reader()"
            )
        if writing and self._failure is not None:
            raise ClosedError(
                f"a change failed ({self._failure!r}); samples added since the last checkpoint are not on SSD: open it "
                "again"
            ) from self._failure

    @contextmanager
    def _writing(self, *breaking: type[BaseException]) -> Iterator[None]:
        """Refuse later changes after an error that leaves the parts of the buffer out of step.

        Such an error comes from a log, leaves memory and placement at odds, or is of a `breaking` kind, which may come
        between any two changes.
        """
        try:
            yield
        except BaseException as error:
            self._note(error, *breaking)
            raise

    def _note(self, error: BaseException, *breaking: type[BaseException]) -> None:
        """Keep an error that leaves the parts of the buffer out of step."""
        at_odds = self._swapper.at_odds or any(log.failed for log in self._storage.logs)
        if isinstance(error, breaking) or at_odds:
            self._failure = error

    @property
    def schema(self) -> Schema:
        """The fields of a sample."""
        return self._settings.schema

    @property
    def step(self) -> int:
        """How many steps have ended."""
        return self._swapper.step

    @property
    def capacity(self) -> int:
        """Slots of the memory tier."""
        return self._placement.slots

    @property
    def swap(self) -> SwapPolicy | None:
        """The swap policy."""
        return self._settings.policy

    @property
    def ahead(self) -> BatchQueue:
        """The batches drawn before their steps, for `memhier.recsys.replay.loader`."""
        return self._ahead

    @property
    def memory_bytes(self) -> int:
        """DRAM held by both tiers, in bytes: samples, slots, index, logs, reader, product codes, swaps under way."""
        parts = (self._memory, self._placement, self._swapper, self._ahead, self._storage)
        return 0 if self._closed else sum(part.memory_bytes for part in parts) + self._settings.codes_memory_bytes

    def __len__(self) -> int:
        """Samples in memory."""
        self._check_open()
        return self._placement.count

    @after_shielded
    def add(self, batch: Mapping[str, Any], labels: Any = None, ids: Any = None, times: Any = None) -> Ints:
        """Add samples: to storage as the admission decides, and some of them to memory at once.

        Parameters
        ----------
        batch
            By field, as `Schema.check` takes it.
        labels
            Integers [n], 0 to 2**31 - 1: their classes. Either all samples of a buffer have labels or none, except with
            ``same_class=False``.
        ids
            Integers [n] of the caller, by which `forget` finds samples; by default the number of earlier samples.
        times
            Integers [n], or one for all: when the samples came, in Unix seconds, for `forget`; by default now.

        Returns
        -------
        numpy.ndarray
            int64 [n]: the slot of memory of each now, -1 for none.

        Raises
        ------
        BudgetError
            If ``admit="everything"`` has no room. Nothing has changed then.
        TypeError, ValueError
            For values of another type or shape, or that a codec cannot hold. Nothing has changed then.
        OSError
            If a write fails. The buffer takes no more samples then; opening it again finds the last checkpoint.
        """
        self._check_open(writing=True)
        placement, admission = self._placement, self._settings.admission
        count, columns = self._settings.schema.check(batch)
        marks = self._checked_labels(labels, count)
        names = np.arange(placement.arrivals, placement.arrivals + count) if ids is None else as_ints("ids", ids)
        if names.shape != (count,):
            raise ValueError(f"ids: expected shape [{count}], got {list(names.shape)}")
        moments = int(time.time()) if times is None else _checked_times(times, count)
        values = admission.values(marks, columns)
        columns = self._settings.encoding.encode(columns)
        self._storage.check(columns)
        if count == 1 and isinstance(moments, int) and self._add_at_once(columns, marks, names, moments):
            return np.array([-1])
        return self._add(columns, marks, names, values, moments)

    def _add_at_once(self, columns: Columns, labels: Ints, ids: Ints, time: int) -> bool:
        """Add one sample that a full reservoir drops, or keeps outside memory; return whether it was such a one.

        If not, nothing has changed.
        """
        placement, members = self._placement, self._placement.members
        full = placement.limit is not None and members.size >= placement.limit and self._rated is None
        if not full or type(self._settings.admission) is not Reservoir or members.by_class or len(self._ahead):
            return False
        if placement.entered is not None:
            return False
        label = int(labels[0])
        uniform, changes = placement.count_at_once(label)
        position = int(uniform * (placement.seen + 1))
        if position < members.size:
            staged = self._storage.append_at_once(position, columns) if placement.is_outside(position) else []
            if not staged:
                return False
            changes += staged + members.replace_at_once(position, label, int(ids[0]), time)
        with self._writing(MemoryError):
            set_at_once(changes)
        return True

    @shielded
    def _add(self, columns: Columns, marks: Ints, names: Ints, values: NDArray[Any], moments: Ints | int) -> Ints:
        placement, admission, count = self._placement, self._settings.admission, len(marks)
        admission.check(placement, count)
        if self._rated is None:
            with self._writing(BaseException):
                return self._admit(columns, marks, names, values, moments)[1]
        self._check_fits(columns)
        times = np.broadcast_to(moments, count)
        positions: Ints = np.full(count, -1)
        with self._writing(BaseException):
            for some in self._storage.pieces(columns):
                part = {name: array[some] for name, array in columns.items()}
                decisions = self._admit(part, marks[some], names[some], values[some], times[some])[0]
                positions[np.isin(positions, decisions.positions)] = -1
                lasting = decisions.lasting()
                positions[some.start + lasting] = decisions.positions[lasting]
                while (excess := self._storage.excess(self._rated)) and placement.size > 1:
                    moved = self._drop(max(1, placement.size - excess))
                    positions = np.where(positions >= 0, moved[positions], -1)
        return np.array([placement.slot_shown(at) if at >= 0 else -1 for at in positions.tolist()], np.int64)

    def _admit(
        self, columns: Columns, labels: Ints, ids: Ints, values: NDArray[Any], times: Ints | int
    ) -> tuple[Decisions, Ints]:
        """Take samples in; return their places and slots."""
        placement = self._placement
        decisions = self._settings.admission.admit(placement, labels, ids, values)
        placement.note(decisions, labels, times)
        return decisions, self._swapper.take_in(decisions, columns, labels, ids)

    def _check_fits(self, columns: Columns) -> None:
        """Raise BudgetError for samples beyond the bytes of a storage that keeps everything."""
        if self._rated is None or self._settings.copies(True).replaces:
            return
        more = int((self._storage.format.most_bytes(columns) + ENTRY_BYTES).sum())
        if self._storage.excess(self._rated, more):
            raise BudgetError(f"storage: {self._placement.size} samples are there and {more} bytes of more do not fit; "
                              "use a larger storage, or admit='reservoir' to keep a sample of the stream")  # fmt: skip

    def _checked_labels(self, labels: Any, count: int) -> Ints:
        """Return labels as integers, -1 for none; the first samples of a buffer decide whether it has labels."""
        members, admission = self._placement.members, self._settings.admission
        decided = self._settings.same_class is None and members.size > 0
        if labels is None:
            if (members.by_class or admission.by_class) and admission.beside != "group":
                raise ValueError("labels: this buffer keeps classes, so every sample needs a label")
            if decided and members.labels[0] >= 0:
                raise ValueError(
                    "labels: the samples before had some, so every sample needs a label; or same_class=False"
                )
            return np.full(count, -1, np.int64)
        marks = as_ints("labels", as_array("labels", labels))
        if marks.shape != (count,):
            raise ValueError(f"labels: expected shape [{count}], got {list(marks.shape)}")
        check_range("labels", marks, 2**31, "a label, 0 to 2**31 - 1")
        if decided and members.labels[0] < 0:
            raise ValueError("labels: the samples before had none; give labels to all samples, or same_class=False")
        return marks

    @after_shielded
    def sample(self, n: int, out: Batch | Mapping[str, Any] | None = None, *, balanced: bool = False) -> Batch:
        """Draw distinct samples from memory, each slot equally likely; or as many of each label.

        Parameters
        ----------
        n
            How many; all samples if memory holds fewer.
        out
            Filled instead of new arrays: a batch of `empty`, or arrays or tensors as `Batch.over` takes them.
        balanced
            Whether the labels in memory have equal shares of the batch, up to one sample; which ones have that is
            drawn, as are the samples of each. They are distinct, unless a label has fewer samples than its share. The
            batch has exact `weights`. Labels may be classes, tasks or clusters. It looks at all slots.

        Returns
        -------
        Batch
            Of min(n, len(self)) samples, in `out`; of n if it is balanced and memory is not empty. Its `tensors` are
            torch tensors of the same memory.

        Raises
        ------
        ValueError
            For a balanced batch of samples without labels.
        """
        if self._closed or self._thread != caller():
            self._check_open(using=True)
        if type(n) is not int:
            n = check_int("n", n, -(2**63), 2**63 - 1)
        if n < 0:
            raise ValueError(f"n={n}: expected 0 or more")
        count = self._placement.count
        if balanced and count:
            batch = room(self._settings.schema, out, n)
            batch.slots[:], batch.weights = self._balanced(n)
        else:
            n = min(n, count)
            batch = room(self._settings.schema, out, n)
            batch.weights = None
            # An interrupt finds this draw made, or not begun.
            self._placement.order.take(self._draws.distinct(n, count), out=batch.slots, mode="clip")
        self._settings.encoding.fill_batch(batch, partial(self._memory.read, batch.slots))
        return batch

    @shielded
    def _balanced(self, n: int) -> tuple[Ints, NDArray[np.float64]]:
        """Draw slots so that every label has its share; return them and their weights."""
        slots = self._placement.occupied()
        labels = self._memory.labels[slots]
        if (labels < 0).all():
            raise ValueError("balanced=True: the samples have no labels; give labels to add")
        order = np.argsort(labels, kind="stable")
        starts, sizes = np.unique(labels[order], return_index=True, return_counts=True)[1:]
        shares: Ints = np.full(len(sizes), n // len(sizes))
        shares[self._draws.distinct(n % len(sizes), len(sizes))] += 1
        drawn: list[Ints] = [np.empty(0, np.int64)]
        for start, size, share in zip(starts.tolist(), sizes.tolist(), shares.tolist(), strict=True):
            rounds, rest = divmod(share, size)
            drawn += [np.arange(start, start + size)] * rounds
            drawn.append(start + self._draws.distinct(rest, size))
        mixed = np.argsort(self._draws.take(n), kind="stable")
        each = np.repeat(len(sizes) * sizes / len(slots), shares)
        return slots[order[np.concatenate(drawn)[mixed]]], each[mixed]

    @shielded
    def draw(self, n: int) -> Ints:
        """Draw slots as `sample` does, for a `reader` to read.

        Returns
        -------
        numpy.ndarray
            int64 [min(n, len(self))].
        """
        self._check_open(using=True)
        count = self._placement.count
        drawn: Ints = self._placement.order[self._draws.distinct(min(check_int("n", n, 0, 2**62), count), count)]
        return drawn

    def empty(self, n: int) -> Batch:
        """Return a batch of n samples for `sample` to fill."""
        return Batch.empty(self.schema, n)

    @after_shielded
    def feedback(self, batch: Batch | Any, scores: Any = None, update: Mapping[str, Any] | None = None) -> None:
        """End a step: due swaps arrive, and the policy chooses some of the samples just used to be swapped.

        Parameters
        ----------
        batch
            The used samples: a batch, or its slots, integers [n].
        scores
            Input of the swap policy: logits ``[n, classes]`` for the gate, with a column for every label, losses
            ``[n]`` for the loss. Arrays, or torch tensors of any floating dtype and device.
        update
            New values of mutable fields, ``[n, ...]`` each, that stay with the samples.

        Raises
        ------
        TypeError, ValueError
            For an unfit argument. Nothing has changed then.
        OSError, CorruptionError
            If samples could not be read: the samples that they were to replace stay, all others have arrived, and the
            step has ended. A note on the error names the sample.
        """
        self._check_open(writing=True)
        slots, ids = self._checked_used(batch)
        if update is None:
            try:  # in place of `_writing`: it takes longer
                if self._swapper.end_step_at_once(slots):
                    return
            except BaseException as error:
                self._note(error)
                raise
        self._feedback(slots, ids, scores, update)

    @shielded
    def _feedback(self, slots: Ints, ids: Ints, scores: Any, update: Mapping[str, Any] | None) -> None:
        values = {} if update is None else self._checked_update(update, len(slots))
        scores = self._swapper.checked_scores(scores, slots, ids)
        with self._writing():
            if values:
                self._swapper.refresh(slots, ids, values)
            self._swapper.end_step(slots, ids, scores)

    @shielded
    def refresh(self, batch: Batch | Any, update: Mapping[str, Any]) -> None:
        """Give samples new values of mutable fields, without ending the step; see `feedback`."""
        self._check_open(writing=True)
        slots, ids = self._checked_used(batch)
        values = self._checked_update(update, len(slots))
        with self._writing():
            self._swapper.refresh(slots, ids, values)

    def _checked_update(self, update: Mapping[str, Any], count: int) -> Columns:
        """Return new values of mutable fields as the tiers hold them; raise for unfit ones."""
        values = self._settings.encoding.encode(check_update(self._settings.schema, update, count), "update")
        self._storage.check(values, "update")
        return values

    def _checked_used(self, batch: Any) -> tuple[Ints, Ints]:
        """Return the slots and ids of a batch; raise for an unfit one."""
        slots = len(self._placement.planned)
        if isinstance(batch, Batch):
            # A batch drawn ahead cannot be drawn anew: its samples beyond the slots of memory have left it.
            if not self._ahead.asked and batch.slots.max(initial=-1) >= slots:
                raise ValueError(f"batch: was drawn when memory had more than its {slots} slots; draw another after "
                                 "resize")  # fmt: skip
            return batch.slots, batch.ids
        used = as_ints("batch", batch)
        if used.ndim != 1:
            raise ValueError(f"batch: expected a Batch, or slots of shape [n], got shape {list(used.shape)}")
        check_range("batch", used, slots, "a slot of memory")
        return used, self._memory.ids[used]

    @shielded
    def hold(self, ids: Any) -> int:
        """Bring stored samples into memory now; they replace others of their class, drawn at random.

        For methods that choose exemplars. Memory is then not a uniform sample of storage, until swaps have replaced
        them.

        Parameters
        ----------
        ids
            Integers [n]; ids that storage does not have are skipped.

        Returns
        -------
        int
            How many came. A class with fewer slots than ids brings as many as fit.
        """
        self._check_open(writing=True)
        with self._writing(KeyboardInterrupt):
            return self._swapper.hold(as_ints("ids", ids))

    @shielded
    def checkpoint(self, values: Mapping[str, bytes] | None = None) -> int:
        """Make the buffer durable as it is, with values of the caller, all or nothing.

        It writes only changes since the last checkpoint: the cost does not depend on the size of storage.

        Parameters
        ----------
        values
            Other state needed to go on from here, such as the trainer's; `value` returns it.

        Returns
        -------
        int
            A number that rises with each checkpoint.

        Raises
        ------
        OSError
            If a write fails. The buffer takes no more changes then, as after any other error of a checkpoint that has
            begun, such as MemoryError; opening it again finds the last checkpoint.
        """
        self._check_open(writing=True)
        changes = {f"{_USER}{name}": value for name, value in (values or {}).items()}
        self._storage.check_values(changes)
        with self._writing(BaseException):
            return self._commit(changes)

    def push(self, url: str, *, keep: int | None = None, verify: bool = False) -> Transfer:
        """Back up the last checkpoint to a URL; see :meth:`memhier.Store.push`."""
        self._check_open()
        return self._storage.store.push(url, keep=keep, verify=verify)

    @staticmethod
    @shielded
    def pull(url: str, path: str | os.PathLike[str], *, generation: int | None = None) -> Transfer:
        """Restore a backup into the directory `path`; see :meth:`memhier.Store.pull`."""
        return Store.pull(url, path, kind=KIND, generation=generation)

    def _commit(self, values: Mapping[str, bytes]) -> int:
        """Make everything durable as it is, and values with it."""
        self._swapper.write_back()
        settings, placement = self._settings, self._placement
        ahead = self._ahead.records()
        meta = {
            "version": VERSION,
            "schema": settings.schema.encode(),
            "codecs": settings.codecs,
            "seed": settings.seed,
            "delay": settings.delay,
            "same_class": settings.same_class,
            **({"field_codecs": settings.schema.codecs} if settings.schema.codecs else {}),
            **({"means": settings.schema.means} if settings.schema.means else {}),
            **({"way_back": True} if settings.way_back else {}),
            **({} if self._dram is None else {"dram": self._dram}),
            **({} if self._rated is None else {"rated": self._rated}),
            "by_class": placement.members.by_class,
            "admit": settings.admission.name,
            **({"admission": there} if (there := settings.admission.encoded()) else {}),
            "swap": encoded_policy(settings.policy),
            "slots": placement.slots,
            "size": placement.size,
            "ahead": [len(record) for record in ahead],
            "step": self._swapper.step,
            "draws": self._draws.position,
            "tiers": placement.state(),
            "policy": None if settings.policy is None else settings.policy.state(),
            "under_way": self._swapper.state(),
            "count": placement.count,
        }
        return self._storage.commit(placement.changed(), ahead, {META: json.dumps(meta).encode(), **values})

    def _restore(self, meta: dict[str, Any]) -> None:
        """Bring a new buffer to the state of a checkpoint; swaps that were under way are read again."""
        settings, placement, storage = self._settings, self._placement, self._storage
        policy, kept, begins = settings.policy, settings.admission, settings.admission.by_class and not meta["by_class"]
        if begins and meta["same_class"] is False:
            raise ValueError(f"admit={kept.name!r}: is about classes, which this buffer does not keep")
        placement.restore_members(storage.read_positions(meta), meta["by_class"])
        if meta["version"] < VERSION:
            # Nobody noted when these samples came: their age begins now.
            placement.members.note_times(np.arange(placement.size), int(time.time()))
        if begins:
            if (placement.members.labels < 0).any():
                raise ValueError(f"admit={kept.name!r}: is about classes, and the samples have no labels")
            placement.keep_classes()
        kept.check_stored(placement)
        placement.restore_slots(storage.read_slots(meta), meta["tiers"])
        self._draws.position = meta["draws"]
        # The state of another policy says nothing to this one.
        if policy is not None and meta["swap"] is not None and meta["swap"][0] == policy.name:
            policy.restore(meta["policy"])
        damaged = self._swapper.restore(meta["step"])
        with described(f"{storage.path}: the batches drawn ahead"):
            damaged += self._ahead.restore(storage.read_ahead(meta["ahead"]), storage)
        damaged = [*dict.fromkeys(damaged)]
        if damaged:
            warnings.warn(
                f"{storage.path}: the samples of ids {damaged} are damaged and have left memory; "
                f"forget({{'id': {damaged}}}) removes them",
                RuntimeWarning, stacklevel=3,
            )  # fmt: skip
        self._swapper.resume(meta["under_way"], len(damaged))

    def value(self, name: str) -> bytes | None:
        """Return a value of the last checkpoint, None if there is none."""
        self._check_open()
        return self._storage.value(f"{_USER}{name}")

    @shielded
    def forget(self, where: Where) -> dict[str, int]:
        """Remove samples from both tiers, and their bytes from SSD; durable when it returns. It is a checkpoint.

        It verifies that no part of a log holds dead bytes, and that no other file of samples is left. It cannot reach
        copies that the SSD itself or backups may hold. Slots of batches drawn before are out of date.

        If storage has dropped samples of the stream, the number of samples left becomes its limit, as after `resize`:
        else it would not stay a uniform sample. The limit stays if everything is forgotten; `resize` enlarges a ring.

        Parameters
        ----------
        where
            ``{"label": 3}``, ``{"id": [7, 9]}``, ``{"before": time.time() - 30 * 86400}`` for those that came earlier
            than that, several of them (samples that fit all), or a function that takes the ids and labels of all stored
            samples, int64 [n] each, and returns bool [n].

        Returns
        -------
        dict
            ``samples`` removed from storage, and ``memory_samples``: those of them that memory held as well.

        Raises
        ------
        CorruptionError
            If the bytes could not be removed, because samples beside them are damaged, or another process reads them.
            If damaged samples, which a note names, would have to move: nothing has changed then.
        """
        self._check_open(writing=True)
        with self._writing(KeyboardInterrupt):
            return self._forget(where)

    def _forget(self, where: Where) -> dict[str, int]:
        placement = self._placement
        doomed = np.flatnonzero(_selected(where, placement.members))
        self._check_removable(doomed)
        shown = [placement.slot_shown(position) for position in doomed.tolist()]
        placement.uncount(doomed)
        self._ahead.forget(doomed)
        self._remove(doomed)
        self._commit({})
        # Even if no sample was found: a log may still have the bytes of samples that storage dropped before.
        self._storage.compact_fully()
        if self._settings.way_back:
            self._commit({})  # so that the way back leads to samples without the forgotten
        self._storage.verify_erased()
        return {"samples": len(doomed), "memory_samples": sum(slot >= 0 for slot in shown)}

    def _check_removable(self, doomed: Ints) -> None:
        """Make sure, before anything changes, that the samples that have to move can be read."""
        self._storage.check_movable(self._placement.movers(doomed), self._placement.members.ids)

    def _remove(self, doomed: Ints) -> None:
        """Take samples out of both tiers; the last positions take the places of those that go."""
        placement, storage = self._placement, self._storage
        size, policy = placement.size - len(doomed), self._settings.policy
        movers = placement.movers(doomed)
        self._ahead.replaced(doomed)
        self._swapper.drop(doomed)
        holes = doomed[doomed < size]
        for start in range(0, len(holes), storage.together):
            some = slice(start, start + storage.together)
            storage.move(holes[some], movers[some])
            for position, old in zip(holes[some].tolist(), movers[some].tolist(), strict=True):
                placement.move(position, old)
                if policy is not None:
                    policy.renamed(position, old)
                self._ahead.renamed(position, old)
                self._swapper.renamed(position, old)
        storage.delete(np.arange(size, placement.size))
        storage.drop_index_rows(placement.remove_last(len(doomed)))

    @shielded
    def resize(self, *, memory: int | str | None = None, storage: int | str | None = None) -> None:
        """Change the size of the tiers.

        A smaller tier drops samples drawn at random; the next steps fill a larger memory from storage, if there is a
        swap policy. Storage that has dropped samples of the stream cannot become a larger sample of it. Slots of
        batches drawn before are out of date.

        Parameters
        ----------
        memory, storage
            As for the buffer; None leaves the tier as it is, but a memory in bytes has more slots beside a smaller
            storage. A storage in bytes is counted beside the new memory: give it again with a larger memory.

        Raises
        ------
        ValueError
            If storage that dropped samples was to grow.
        """
        self._check_open(writing=True)
        settings, buffers = self._settings, self._storage.buffers
        limit = self._placement.limit
        if memory is None and self._dram is not None:
            # The index of storage is part of the budget, so another storage leaves memory more or fewer slots.
            tiers = settings.tiers(f"{self._dram}B", storage, limit, buffers)
        else:
            tiers = settings.tiers(self.capacity if memory is None else memory, storage, limit, buffers)
        with self._writing(KeyboardInterrupt):
            if storage is not None:
                assert tiers.limit is not None
                self._resize_storage(tiers.limit)
                self._rated = tiers.rated
                while self._rated and (excess := self._storage.excess(self._rated)) and self._placement.size > 1:
                    self._drop(max(1, self._placement.size - excess))
            if tiers.slots != self.capacity and (memory is not None or storage is not None):
                self._resize_memory(tiers.slots)
            self._dram = tiers.dram
            self._bound_storage()

    def _resize_memory(self, slots: int) -> None:
        self._swapper.resize(slots, stream(self._settings.seed, Purpose.RESIZE, self._placement.arrivals))

    def _resize_storage(self, limit: int) -> None:
        placement = self._placement
        size, seen = placement.size, placement.seen
        if placement.limit == size < min(limit, seen) and self._settings.admission.name != "ring":
            raise ValueError(
                f"storage={limit} samples: {seen} came and {size} were kept; the others are gone, so that a larger "
                "uniform sample cannot be had"
            )
        if limit < size:
            self._drop(limit)
        placement.set_limit(limit)

    def _drop(self, limit: int) -> Ints:
        """Let storage keep `limit` samples from now on; return the new position of each old one, -1 for none."""
        placement, size = self._placement, self._placement.size
        random = stream(self._settings.seed, Purpose.RESIZE, placement.arrivals)
        keys = placement.members.keys
        order = random.permutation(size) if keys is None else keys.order(size)
        doomed = np.sort(order[limit:])
        self._check_removable(doomed)
        moved = np.arange(size)
        moved[doomed], moved[placement.movers(doomed)] = -1, doomed[doomed < limit]
        self._remove(doomed)
        placement.set_limit(limit)
        return moved

    def _bound_storage(self) -> None:
        """Let storage take no more bytes than the samples that it may hold."""
        limit = self._placement.limit
        if limit is not None:
            rated, packed = self._rated or limit, self._rated is not None
            self._storage.keep_within(self._settings.log_bytes(rated, self._placement.slots, packed))

    @property
    def keeps_classes(self) -> bool:
        """Whether swaps keep the classes of memory, however many classes there are."""
        return bool(self._settings.same_class)

    def stored_ids(self) -> Ints:
        """Return the ids of all samples in storage, int64 [n], a copy; their order means nothing."""
        self._check_open()
        return self._placement.members.ids.copy()

    def occupied(self) -> Ints:
        """Return the slots that hold samples, int64 [len(self)], in place: the array changes with the buffer."""
        self._check_open()
        return self._placement.occupied()

    @shielded
    def reader(self) -> MemoryReader:
        """Return a reader of memory for other processes: pickle it to them, or fork them."""
        self._check_open()
        return MemoryReader(self.schema, self._memory.slab)

    @shielded_giving(close_made)
    def dataset(self) -> StoredSamples:
        """Return the samples of the last checkpoint as a data set, for loaders, and to be closed before `forget`.

        See :mod:`memhier.recsys.replay.datasets` to mix it with another data set, or to stream it.
        """
        self._check_open()
        return StoredSamples(self._storage.path)

    @shielded
    def stats(self) -> dict[str, Any]:
        """Return plain numbers.

        ``step``; ``memory_samples`` of ``memory_slots``; ``storage_samples`` of ``storage_limit``; ``arrivals``, and
        ``seen``: the samples of which storage is a sample, without the forgotten ones; ``swapped`` samples, and
        ``under_way`` those that have not arrived; ``stalls``: swaps that a step waited for, ``stall_s`` seconds in all;
        ``read_s`` seconds of reading; ``errors`` of reading; ``memory_bytes``; ``storage_bytes`` on SSD; ``reads`` and
        ``read_bytes``.

        Raises
        ------
        ClosedError
            After `close`.
        """
        self._check_open()
        placement, reads = self._placement, self._storage.reader.stats()
        return {
            "step": self._swapper.step,
            "memory_samples": placement.count,
            "memory_slots": placement.slots,
            "storage_samples": placement.size,
            "storage_limit": placement.limit,
            "arrivals": placement.arrivals,
            "seen": placement.seen,
            **self._swapper.stats(),
            "memory_bytes": self.memory_bytes,
            "storage_bytes": self._storage.disk_bytes,
            "reads": reads["reads"],
            "read_bytes": reads["bytes"],
        }

    @shielded
    def check(self) -> list[Finding]:
        """Read everything that the last checkpoint holds and return every inconsistency."""
        self._check_open()
        return self._storage.check_store()

    def __repr__(self) -> str:
        if self._closed:
            return "CarouselBuffer(closed)"
        inside, size = self._placement.count, self._placement.size
        return f"CarouselBuffer({inside} of {size} samples in memory, step={self.step})"


def _name_of(thread: int | None) -> str:
    return next((each.name for each in threading.enumerate() if each.ident == thread), str(thread))


def _checked_times(times: Any, count: int) -> Ints:
    """Return the times of `count` samples, one for all or one for each."""
    moments = as_ints("times", as_array("times", times))
    if moments.shape not in ((), (count,)):
        raise ValueError(f"times: expected one number or shape [{count}], got {list(moments.shape)}")
    check_range("times", moments.reshape(-1), 2**32, "a time in Unix seconds, 0 to 2**32 - 1")
    return np.broadcast_to(moments, count)


def _selected(where: Where, members: Members) -> NDArray[np.bool_]:
    """Return which samples the argument of `CarouselBuffer.forget` selects."""
    ids, labels = members.ids.copy(), members.labels.astype(np.int64)
    if callable(where):
        chosen = np.asarray(where(ids, labels))
        if chosen.dtype != np.bool_ or chosen.shape != ids.shape:
            raise ValueError(f"where: expected a function that returns bool [{len(ids)}], got {chosen.dtype} "
                             f"{list(chosen.shape)}")  # fmt: skip
        return chosen
    if not isinstance(where, Mapping) or not where or set(where) - {"id", "label", "before"}:
        raise ValueError(
            f"where={where!r}: expected a dict of some of 'id', 'label' and 'before', or a function of ids and labels"
        )
    chosen = np.ones(len(ids), np.bool_)
    for name, values in (("id", ids), ("label", labels)):
        if name in where:
            chosen &= np.isin(values, as_ints(f"where[{name!r}]", where[name]).reshape(-1))
    if "before" in where:
        chosen &= members.times < check_number("where['before']", where["before"], 0, 2**32)
    return chosen
