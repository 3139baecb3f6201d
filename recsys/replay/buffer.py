"""CarouselBuffer: the memory of a learner, most of it on SSD (Carousel Memory, arXiv 2110.07276)."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import check_int
from memhier.arrays import as_ints
from memhier.fields import described
from memhier.files import Files
from memhier.io.read_arguments import as_int
from memhier.recsys.replay.batch import Batch, room
from memhier.recsys.replay.guarded import Guarded, closing_on_error
from memhier.recsys.replay.parts import Parts, Settings, as_codecs, memory_slots, replaces, stats, storage_limit
from memhier.recsys.replay.placement.admit import Admission, admission
from memhier.recsys.replay.placement.forget import Where, forget, resize
from memhier.recsys.replay.placement.hold import hold
from memhier.recsys.replay.placement.intake import as_labels, distinct, refresh, take_in
from memhier.recsys.replay.reader import MemoryReader
from memhier.recsys.replay.schema import Schema
from memhier.recsys.replay.state import USER, commit, policy_of, restore, settings_of
from memhier.recsys.replay.storage.storage import StorageTier
from memhier.recsys.replay.swap.exchange import as_update, as_used, checked_scores, end_step
from memhier.recsys.replay.swap.policies import SwapPolicy, swap_policy
from memhier.shield import caller, close_made, shielded, shielded_giving, shielded_init
from memhier.store.store import Finding

__all__ = ["CarouselBuffer"]

Ints = NDArray[np.int64]


class CarouselBuffer(Guarded):
    """Every sample on SSD, a small working set of them in DRAM that is swapped while training runs.

    A training step is `sample`, the computing, `feedback`. The last ends the step: it chooses which of the samples that
    were used leave memory, and a thread reads their replacements while the next step computes. A swap decided in step t
    is visible from the end of step t + `delay` on, whatever the I/O does: which samples a step sees depends on the seed
    and the calls alone, in a resumed run as well.

    The thread that made it uses it; other threads and processes read memory through what `reader` returns.

    Parameters
    ----------
    path
        A directory to make; see `open` for one that is there.
    memory
        Size of the memory tier: samples as an int, or bytes as text: ``"64MiB"``, which holds the samples and what is
        kept of each slot. The index of storage (about 70 bytes for each sample there) and buffers come on top;
        `memory_bytes` counts everything.
    storage
        Size of the storage tier: samples as an int, bytes as text, or None for all that come. Bytes are held to at
        every moment, with checkpoints or without: there is room for each sample twice, as of the last checkpoint,
        which a crash goes back to, and as it is now (once with ``admit="everything"``, but for mutable fields).
        Samples whose packed size differs are counted as large as they may become. Batches drawn ahead and the values
        given to `checkpoint` come on top. ``stats()["storage_limit"]`` says how many samples that is.
    schema
        The fields of a sample: a `Schema`, or what it is made from.
    admit
        ``"reservoir"``, ``"class_balanced"``, ``"ring"`` or ``"everything"``: what storage keeps, and what enters
        memory; see `memhier.recsys.replay.placement.admit`.
    swap
        ``"random"``, ``"deck"``, ``"gate"``, ``"loss"`` or ``"age"`` with a ratio of one half, a policy such as
        ``RandomSwap(0.2)``, or None: memory then keeps what was admitted.
    codec
        How fields are kept in storage, by name; see `memhier.recsys.replay.storage.codecs.field_codec`.
    seed
        0 to 2**63 - 1.
    delay
        Steps from a swap's decision to its arrival. 0 waits for the reads in `feedback`.
    same_class
        Whether what comes in is of the class of what leaves, so that the classes in memory change by admission alone.
        By default with ``admit="class_balanced"`` only, and as long as there are no more classes than slots: swaps else
        bring any sample, and every class in turn. CarM's methods, and what notes the labels of slots as Avalanche does,
        ask for True.

    Raises
    ------
    FileExistsError
        When there is something at `path`.
    BudgetError
        When a budget is too small for one sample.
    TypeError, ValueError
        For an unfit argument.
    RuntimeError
        From every call that uses or changes it, on another thread than that which made it.

    Examples
    --------
    >>> import tempfile, pathlib
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
        files: Files | None = None,
    ) -> None:
        schema = schema if isinstance(schema, Schema) else Schema(schema)
        kept = admission(admit)
        if kept.by_class and same_class is False:
            raise ValueError(f"same_class=False: admit={kept.name!r} is about classes; expected True or None")
        seed, delay = check_int("seed", seed, 0, 2**63 - 1), check_int("delay", delay, 0, 1000, "steps")
        codecs = as_codecs(codec)
        policy, slots = swap_policy(swap), memory_slots(memory, schema)
        limit = storage_limit(storage, schema, codecs, slots, replaces(kept))
        tier = StorageTier.create(path, schema, codecs, limit is not None, files)
        with closing_on_error(tier):
            super().__init__(Parts(Settings(schema, codecs, seed, delay, same_class), tier, slots, limit, kept, policy))
            commit(self._parts, {})

    @classmethod
    @shielded_giving(close_made)
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        memory: int | str | None = None,
        swap: SwapPolicy | None = None,
        admit: Admission | None = None,
        schema: Schema | Mapping[str, Any] | None = None,
        files: Files | None = None,
    ) -> Self:
        """Open a buffer as of its last checkpoint, to go on from there.

        A damaged sample that was in memory leaves it, with a warning that names it.

        Parameters
        ----------
        path
            Its directory.
        memory
            Another size of the memory tier, as by `resize`.
        swap, admit
            Where the caller's own were used, which a checkpoint cannot hold; or to go on with others.
        schema
            What samples are expected to be.

        Raises
        ------
        FormatError
            When `path` holds something else, or samples of another schema.
        LockedError
            When somebody has it open.
        """
        store, meta = StorageTier.open_store(path, writable=True, files=files)
        with closing_on_error(store):
            settings = settings_of(meta, Path(path), schema)
            policy = policy_of(meta["swap"], swap, Path(path))
            with described(f"{path}: the admission"):
                kept = admit or admission(meta["admit"])
            with described(f"{path}: the samples"):
                tier = StorageTier(store, settings.schema, settings.codecs, meta["tiers"]["limit"] is not None)
        buffer = cls.__new__(cls)
        with closing_on_error(tier):
            parts = Parts(settings, tier, meta["slots"], meta["tiers"]["limit"], kept, policy)
        Guarded.__init__(buffer, parts)
        with closing_on_error(buffer):
            restore(parts, meta)
            if memory is not None:
                buffer.resize(memory=memory)
        return buffer

    @property
    def schema(self) -> Schema:
        """The fields of a sample."""
        return self._parts.settings.schema

    @property
    def step(self) -> int:
        """How many steps have ended."""
        return self._parts.step

    @property
    def capacity(self) -> int:
        """Slots of the memory tier."""
        return self._parts.tiers.residents.slots

    @property
    def swap(self) -> SwapPolicy | None:
        """The swap policy."""
        return self._parts.policy

    @property
    def memory_bytes(self) -> int:
        """DRAM held by both tiers, in bytes: samples, slots, index, logs, reader, and swaps under way."""
        return 0 if self._closed else self._parts.memory_bytes

    def __len__(self) -> int:
        """Samples in memory."""
        self._check_open()
        return self._parts.tiers.residents.count

    @shielded
    def add(self, batch: Mapping[str, Any], labels: Any = None, ids: Any = None) -> Ints:
        """Take samples in: to storage as the admission decides, and to memory some of them at once.

        Parameters
        ----------
        batch
            By field, as `Schema.check` takes it.
        labels
            Integers [n], 0 to 2**31 - 1: their classes. All samples of a buffer have labels, or none, but with
            ``same_class=False``.
        ids
            Integers [n] of the caller's, by which `forget` finds samples; by default the number of samples before.

        Returns
        -------
        numpy.ndarray
            int64 [n]: the slot of memory that each is in now, -1 for none.

        Raises
        ------
        BudgetError
            When ``admit="everything"`` has no room. Nothing has changed then.
        TypeError, ValueError
            For values of another type or shape, or that a codec cannot hold. Nothing has changed then.
        OSError
            When a write fails. The buffer takes no more samples then; opening it again finds the last checkpoint.
        """
        self._check_open(writing=True)
        parts = self._parts
        count, columns = self.schema.check(batch)
        marks = as_labels(parts, labels, count)
        names = np.arange(parts.tiers.arrivals, parts.tiers.arrivals + count) if ids is None else as_ints("ids", ids)
        if names.shape != (count,):
            raise ValueError(f"ids: expected shape [{count}], got {list(names.shape)}")
        parts.storage.check(columns)
        parts.admission.check(parts.tiers, count)
        with self._writing(BaseException):
            return take_in(parts, columns, marks, names)

    @shielded
    def sample(self, n: int, out: Batch | Mapping[str, Any] | None = None) -> Batch:
        """Draw distinct samples from memory, each slot equally likely.

        Parameters
        ----------
        n
            How many; where memory holds fewer, all of them are returned.
        out
            To fill instead of allocating: a batch of `empty`, or arrays or tensors as `Batch.over` takes them.

        Returns
        -------
        Batch
            Of min(n, len(self)) samples, in `out`; its `tensors` are torch's, in place.
        """
        if self._closed or self._thread != caller():
            self._check_open(using=True)
        parts = self._parts
        residents = parts.tiers.residents
        # A bool is an int for Python, but as a size it is a mistake.
        n = min(as_int("n", n), residents.count) if not isinstance(n, bool | np.bool_) else check_int("n", n, 0, 0)
        if n < 0:
            raise ValueError(f"n={n}: expected 0 or more")
        batch = room(parts.settings.schema, out, n)
        residents.order.take(distinct(parts.draws, n, residents.count), out=batch.slots, mode="clip")
        parts.memory.read(batch.slots, batch)
        return batch

    def empty(self, n: int) -> Batch:
        """Return a batch for so many samples, to be filled by `sample`."""
        return Batch.empty(self.schema, n)

    @shielded
    def feedback(self, batch: Batch | Any, scores: Any = None, update: Mapping[str, Any] | None = None) -> None:
        """End a step: swaps that are due arrive, and some of the samples just used are chosen to be swapped.

        Parameters
        ----------
        batch
            What was used: a batch, or the slots, integers [n], of one.
        scores
            What the swap policy goes by: logits ``[n, classes]`` for the gate, a column for every label that there is,
            losses ``[n]`` for the loss. Arrays, or torch tensors of any floating dtype and device.
        update
            New values of mutable fields, ``[n, ...]`` each, that stay with the samples.

        Raises
        ------
        TypeError, ValueError
            For an unfit argument. Nothing has changed then.
        OSError, CorruptionError
            When samples could not be read: what they were to replace stays, all others have arrived, and the step has
            ended. A note on the error names the sample.
        """
        self._check_open(writing=True)
        parts = self._parts
        slots, ids = as_used(parts, batch)
        values = as_update(self.schema, update, len(slots))
        scores = None if parts.policy is None else checked_scores(parts, scores, slots, ids)
        with self._writing():
            if values:
                refresh(parts, slots, ids, values)
            end_step(parts, slots, ids, scores)

    @shielded
    def refresh(self, batch: Batch | Any, update: Mapping[str, Any]) -> None:
        """Give samples new values of mutable fields, without ending the step; see `feedback`."""
        self._check_open(writing=True)
        slots, ids = as_used(self._parts, batch)
        values = as_update(self.schema, update, len(slots))
        with self._writing():
            refresh(self._parts, slots, ids, values)

    @shielded
    def hold(self, ids: Any) -> int:
        """Bring stored samples into memory now, in place of others of their class, drawn at random.

        For methods that choose exemplars. Memory is no uniform sample of storage then, until swaps have replaced them.

        Parameters
        ----------
        ids
            Integers [n]; those that storage does not have are left out.

        Returns
        -------
        int
            How many came; those of classes with fewer slots than ids wait for swaps like all others.
        """
        self._check_open(writing=True)
        with self._writing(KeyboardInterrupt):
            return hold(self._parts, as_ints("ids", ids))

    @shielded
    def checkpoint(self, values: Mapping[str, bytes] | None = None) -> int:
        """Make the buffer durable as it is, with values of the caller's, all or nothing.

        Only what came since the last checkpoint is written: the cost does not depend on how much storage holds.

        Parameters
        ----------
        values
            What else must be known to go on from here, such as the trainer's state; `value` returns them.

        Returns
        -------
        int
            A number that rises with each checkpoint.

        Raises
        ------
        OSError
            When a write fails. The buffer takes no more calls then, as after any other error of a checkpoint that has
            begun, such as MemoryError; opening it again finds the last one.
        """
        self._check_open(writing=True)
        changes = {f"{USER}{name}": value for name, value in (values or {}).items()}
        self._parts.storage.samples.check_values(changes)
        with self._writing(BaseException):
            return commit(self._parts, changes)

    def value(self, name: str) -> bytes | None:
        """Return a value of the last checkpoint, None where there is none."""
        self._check_open()
        return self._parts.storage.store.get(f"{USER}{name}")

    @shielded
    def forget(self, where: Where) -> dict[str, int]:
        """Remove samples from both tiers, and their bytes from SSD; durable when it returns. It is a checkpoint.

        A storage tier that has dropped samples of the stream gets smaller by those that go, as after `resize`: else it
        would not stay a uniform sample. One that has forgotten everything does not.

        Parameters
        ----------
        where
            ``{"label": 3}``, ``{"id": [7, 9]}``, both (samples that fit both), or a function that takes the ids and
            labels of all stored samples, int64 [n] each, and returns bool [n].

        Returns
        -------
        dict
            ``samples`` removed from storage, of which ``memory_samples`` were in memory as well. Before it returns, it
            has verified that no part of a log holds dead bytes, and that no other file of samples is left. Copies that
            the SSD itself or backups may hold are beyond its reach. Slots of batches drawn before are out of date.

        Raises
        ------
        CorruptionError
            When the bytes could not be removed, because other samples beside them are damaged, or somebody reads them.
            When damaged samples would have to move, which a note names: nothing has changed then.
        """
        self._check_open(writing=True)
        with self._writing(KeyboardInterrupt):
            return forget(self._parts, where)

    @shielded
    def resize(self, *, memory: int | str | None = None, storage: int | str | None = None) -> None:
        """Change the size of the tiers.

        A smaller tier drops samples drawn at random; a larger memory is filled from storage in the next steps, if there
        is a swap policy. Storage that has dropped samples of the stream already cannot become a larger sample of it.
        Slots of batches drawn before are out of date.

        Parameters
        ----------
        memory, storage
            As for the buffer; None leaves the tier as it is. A storage in bytes is counted beside the memory there is
            then: give it again with a larger memory. ValueError when storage was to grow that dropped samples.
        """
        self._check_open(writing=True)
        slots = None if memory is None else memory_slots(memory, self.schema)
        parts = self._parts
        beside, kept = slots or self.capacity, replaces(parts.admission)
        limit = storage_limit(storage, self.schema, parts.settings.codecs, beside, kept)
        with self._writing(KeyboardInterrupt):
            resize(parts, slots, limit)

    @property
    def keeps_classes(self) -> bool:
        """Whether what a swap brings in is of the class of what leaves, however many classes there are."""
        return bool(self._parts.settings.same_class)

    def stored_ids(self) -> Ints:
        """Return the ids of all samples in storage, int64 [n], a copy in no order that means anything."""
        self._check_open()
        return self._parts.tiers.members.ids.copy()

    def occupied(self) -> Ints:
        """Return the slots that hold samples, int64 [len(self)], in place: it changes with the buffer."""
        self._check_open()
        return self._parts.tiers.residents.occupied()

    @shielded
    def reader(self) -> MemoryReader:
        """Return what reads memory in other processes: pickle it to them, or fork them."""
        self._check_open()
        return MemoryReader(self.schema, self._parts.memory.slab)

    @shielded
    def stats(self) -> dict[str, Any]:
        """Return plain numbers.

        ``step``; ``memory_samples`` of ``memory_slots``; ``storage_samples`` of ``storage_limit``; ``arrivals``, and
        ``seen`` of them that storage is a sample of, without the forgotten; ``swapped`` samples, ``under_way`` of them,
        ``stalls`` (steps that waited for a swap), ``stall_s`` they waited, ``read_s`` that the thread read; ``errors``
        of reading; ``memory_bytes``; ``storage_bytes`` on SSD; reads and bytes of the reader.

        Raises
        ------
        ClosedError
            After `close`.
        """
        self._check_open()
        return stats(self._parts)

    @shielded
    def check(self) -> list[Finding]:
        """Read everything that the last checkpoint holds and return every inconsistency."""
        self._check_open()
        return self._parts.storage.store.check()

    def __repr__(self) -> str:
        if self._closed:
            return "CarouselBuffer(closed)"
        tiers = self._parts.tiers
        return f"CarouselBuffer({tiers.residents.count} of {tiers.members.size} samples in memory, step={self.step})"
