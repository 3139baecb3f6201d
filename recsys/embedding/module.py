"""TableModule: the base of all modules of tables, with checkpoints and torch's habits."""

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from os import PathLike
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from memhier.arguments import as_ints
from memhier.closing import Closing
from memhier.recsys.embedding.device.crossing import Crossing
from memhier.recsys.embedding.device.link import DeviceLink, check_device, link_of
from memhier.recsys.embedding.initial import TableSpec, initial_weights
from memhier.recsys.embedding.look_ups import FusedOptimizer, LookUps
from memhier.recsys.embedding.pooling import Bags, pool
from memhier.recsys.embedding.records import EXTRA, as_json
from memhier.recsys.embedding.tables import StepRows, Tables
from memhier.recsys.embedding.torch_internals import current_pass
from memhier.recsys.embedding.vocabularies import Vocabularies
from memhier.shield import shielded
from memhier.store.segments import PAGE_BYTES
from memhier.store.store import Store, Transfer
from memhier.table.tiered import KIND

__all__ = ["TableModule"]

_BLOCK = 4096


class TableModule(Closing, nn.Module):
    """A module that keeps its tables in DRAM and on SSD, and updates them itself.

    The rows are not parameters, so other optimizers and DDP do not see them. An empty parameter stands for them:
    ``requires_grad_(False)`` on the module or its model freezes the rows.

    By default a backward pass applies its gradients once, at its end, however many look-ups it goes through. It waits
    for a look-up that still has no backward pass of its own, until that look-up has one, its output is forgotten, or
    the tables are used again. With ``update="step"`` gradients wait for ``module.optimizer.step()``: several backward
    passes, such as micro-batches, add up, and gradients can be scaled. Their rows stay in DRAM until then.

    Rows are summed and trained on the CPU. ``module.to("cuda")``, or that of its model, brings the outputs there; ids
    may lie on the CPU or there. The values that the methods return lie on the CPU.
    """

    def __init__(self, look_ups: LookUps) -> None:
        super().__init__()
        self.look_ups = look_ups
        self.tables: Tables = look_ups.tables
        self.optimizer: FusedOptimizer = look_ups.optimizer
        self._anchor = look_ups.anchor
        self._end_epoch: Callable[[], None] | None = None
        self._link: DeviceLink | None = None
        try:
            self.to(self.tables.options.device)
            begun, saved = self.tables.hyperparameters
            for group, values in zip(self.optimizer.param_groups, saved, strict=False):
                group.update(values)
            self._begun_with = self.tables.rules.described(begun)
        except BaseException:
            self.tables.close()
            raise
        self._saved_steps = list(self.tables.record.steps)  # as of the last checkpoint

    @shielded
    def begin_epoch(self, end: Callable[[], None]) -> None:
        """End the epoch of lookahead that is under way, if any; `end` ends the one that begins."""
        before, self._end_epoch = self._end_epoch, end
        if before is not None:
            before()

    @property
    def specs(self) -> tuple[TableSpec, ...]:
        """The tables."""
        return self.tables.specs

    @property
    def memory_bytes(self) -> int:
        """DRAM held by the tables, in bytes."""
        return self.tables.memory_bytes

    @property
    def steps(self) -> int:
        """Updates so far, those before the last resume included."""
        self.look_ups.end_step()
        return max(self.tables.record.steps, default=0)

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: see :meth:`memhier.table.tiered.Tiered.stats`.

        ``rows_per_page`` is the mean number of needed rows in a page of 4 KiB that was read; 0 before the first read.
        """
        found = self.tables.stats()
        pages = found["read_bytes"] / PAGE_BYTES
        return found | {"rows_per_page": found["refetches"] / pages if pages else 0.0}

    def initial_weights(self, rows: Any, table: int = 0) -> Tensor:
        """Return the first values of rows, float32 [n, dim], to make the same table in memory; see :meth:`weights`."""
        spec = self.tables.specs[table]
        ids = as_ints("rows", rows)
        if spec.id_space is None:
            self.tables.check_ids(table, ids)
        return torch.from_numpy(initial_weights(spec.initial, self.tables.seed, table, ids, spec.dim, spec.capacity))

    def weights(self, rows: Any, table: int = 0) -> Tensor:
        """Return rows as they are now, float32 [n, dim], a copy.

        Parameters
        ----------
        rows
            Integers [n]: rows of the table; IndexError for one that it does not have. Of a table for any ids, ids.
        table
            Number of the table in its collection.
        """
        self.look_ups.settle()
        found = self.tables.read(table, as_ints("rows", rows))
        return torch.from_numpy(np.ascontiguousarray(found[..., : self.tables.specs[table].dim]))

    def optimizer_state(self, rows: Any, table: int = 0) -> Tensor:
        """Return the optimizer's state of rows, float32 [n, width], a copy; arguments as in :meth:`weights`."""
        self.look_ups.settle()
        found = self.tables.read(table, as_ints("rows", rows))
        return torch.from_numpy(np.ascontiguousarray(found[..., self.tables.specs[table].dim :]))

    def ids(self, table: int = 0) -> Iterator[Tensor]:
        """Yield the ids that have a row, of a table for any ids: int64 blocks, in the order of rows.

        Do not train meanwhile.

        Raises
        ------
        ValueError
            For a table whose ids are its rows.
        """
        self.look_ups.settle()
        return (torch.from_numpy(ids) for _, ids in self._vocabularies(table).items(table))

    def contains(self, ids: Any, table: int = 0) -> Tensor:
        """Return whether each id has a row of its own, bool of the shape of `ids`; in a table for any ids."""
        wanted = as_ints("ids", ids)
        return torch.from_numpy(self._vocabularies(table).contains(table, wanted.reshape(-1)).reshape(wanted.shape))

    def _vocabularies(self, table: int) -> Vocabularies:
        self.tables.check_open()
        found = self.tables.vocabularies
        if found is None or not found.has(table):
            name = self.tables.specs[table].name
            raise ValueError(
                f"table={table}: the ids of {name!r} are its rows; a table for any ids has id_space='hash64'"
            )
        return found

    @shielded
    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients that wait for a step by `factor`; RuntimeError without ``update="step"``."""
        self.look_ups.scale(factor)

    def gradient_norm(self) -> Tensor:
        """Return the Euclidean norm of the gradients that wait for a step; with ``update="step"``."""
        return self.look_ups.norm()

    @shielded
    def checkpoint(self, extra: Mapping[str, Any] | None = None) -> int:
        """Make all tables durable as they are now, all or nothing.

        Parameters
        ----------
        extra
            Any values that JSON can hold, such as the position of the loader; :attr:`extra` has them after a resume.

        Returns
        -------
        int
            The checkpoint's generation, rising.

        Raises
        ------
        RuntimeError
            When gradients wait for a step.
        ValueError
            When a step could not take the optimizer's hyperparameters.
        OSError
            With ``errno`` ENOSPC, EDQUOT or EFBIG, when the disk is full: make room and call again, nothing is lost. A
            step whose rows push others out may raise it as well; if its backward pass did, it has changed nothing.
        OSError, ClosedError
            When another failure keeps it from being written; the last checkpoint is still there.
        """
        generation = self.tables.checkpoint(self._checkpoint_values(extra))
        self._saved_steps = list(self.tables.record.steps)
        return generation

    @shielded
    def start_checkpoint(self, extra: Mapping[str, Any] | None = None) -> "Future[int]":
        """Take a checkpoint of this moment, and make it durable on a thread while the training goes on.

        The call itself writes nothing; a row that is trained before the thread has written it is copied first.
        Arguments and errors are those of :meth:`checkpoint`; the result raises the errors of the thread.
        """
        values = self._checkpoint_values(extra)
        steps = list(self.tables.record.steps)

        def note(done: "Future[int]") -> None:
            if done.exception() is None:
                self._saved_steps = steps

        future = self.tables.start_checkpoint(values)
        future.add_done_callback(note)
        return future

    def push(self, url: str, *, keep: int | None = None, verify: bool = False) -> Transfer:
        """Back up the last checkpoint to a URL; see :meth:`memhier.Store.push`."""
        return self.tables.push(url, keep, verify)

    @staticmethod
    @shielded
    def pull(url: str, path: str | PathLike[str], *, generation: int | None = None) -> Transfer:
        """Restore a backup into the directory `path`; see :meth:`memhier.Store.pull`."""
        return Store.pull(url, path, kind=KIND, generation=generation)

    def _checkpoint_values(self, extra: Mapping[str, Any] | None) -> dict[str, bytes]:
        self.look_ups.settle()
        if self.look_ups.waiting:
            raise RuntimeError(f"{self.look_ups.waiting} backward passes wait for optimizer.step(): take it first")
        rules, groups = self.tables.rules, self.optimizer.param_groups
        rules.check(groups)
        values = {
            "hyperparameters": rules.described(groups),
            "begun_with": self._begun_with,
            "extra": dict(extra or {}),
        }
        return {EXTRA: as_json(values)}

    @property
    def extra(self) -> dict[str, Any]:
        """The `extra` of the last checkpoint."""
        return dict(self.tables.extra().get("extra", {}))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Put a small tensor in place of each table's weights: bytes that name the checkpoint that has them."""
        for name in self._weight_names():
            pointer = {"path": self.tables.path, "steps": self._saved_steps}
            destination[prefix + name] = torch.tensor([*json.dumps(pointer).encode()], dtype=torch.uint8)

    def _load_from_state_dict(
        self, state: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        """Check that a pointer names the checkpoint that was resumed; copy weights into the tables."""
        self.look_ups.catch_up()
        for table, name in enumerate(self._weight_names()):
            value = state.get(prefix + name)
            spec = self.tables.specs[table]
            if value is None:
                missing.append(prefix + name)
            elif value.dtype == torch.uint8 and value.dim() == 1:
                pointer = json.loads(bytes(value.tolist()))
                if pointer["steps"] != self.tables.record.steps:
                    errors.append(
                        f"{prefix}{name}: points at the checkpoint of {pointer['path']!r} after {pointer['steps']} "
                        f"updates, but these tables have had {self.tables.record.steps}: open them with resume=True"
                    )
            elif spec.id_space is not None:
                errors.append(f"{prefix}{name}: a table for any ids takes no weights by row: open it with resume=True")
            elif tuple(value.shape) != (spec.rows, spec.dim):
                errors.append(f"{prefix}{name}: expected [{spec.rows}, {spec.dim}], got {list(value.shape)}")
            else:
                for start in range(0, spec.rows, _BLOCK):
                    some = value[start : start + _BLOCK].detach().to("cpu", torch.float32).numpy()
                    self.tables.write(table, np.arange(start, start + len(some)), some)

    def _weight_names(self) -> list[str]:
        """Return the keys of the tables in a state dict."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the outputs, and refuse to convert the rows; `to`, `half`, `cuda` and others call this."""
        found = fn(torch.zeros(1))
        name = type(self).__name__
        if found.dtype != torch.float32:
            raise TypeError(
                f"{name}: its rows are float32 and stay so, {found.dtype} was asked for: convert the dense part alone, "
                "such as model.dense.half(), or run it under torch.autocast"
            )
        if found.device != self.device:
            check_device(found.device, name)
            self._link = link_of(found.device)
            self._anchor.move(self.device)
        return self

    @property
    def device(self) -> torch.device:
        """The device of the outputs."""
        return torch.device("cpu") if self._link is None else self._link.device

    def _crossing(self) -> Crossing | None:
        return None if self._link is None else Crossing(self._link)

    @shielded
    def close(self) -> None:
        """End the threads, and free memory and files; updates since the last checkpoint are lost."""
        self.look_ups.close()
        self.tables.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__}: has files and threads, so it cannot be copied or pickled: save its state_dict() "
            "after a checkpoint(), and open the folder with resume=True"
        )

    def _pooled(self, bags: list[Bags]) -> Tensor:
        """Look up and pool the bags of a step; their ids become indices here."""
        ids, trains = [bag.indices.numpy() for bag in bags], self._trains
        look_up = self.look_ups.begin(trains)
        rows = self.look_ups.rows_of(ids, trains, self._admits)
        if look_up is not None:
            look_up.rows = rows
        for bag in bags:
            if bag.padding >= 0:
                bag.padding = self._place(rows, bag)
        done = partial(self.look_ups.take, look_up, rows) if trains else None
        output = pool(self.tables, rows, bags, self._anchor, done, self._crossing())
        if not trains:
            rows.release()
        return output

    @property
    def _admits(self) -> bool:
        """Whether ids that are looked up now get rows of their own; activations computed again have those of before."""
        return self._trains and current_pass() < 0

    @property
    def _trains(self) -> bool:
        """Whether rows that are looked up now will have a gradient."""
        return torch.is_grad_enabled() and self.training and self._anchor.requires_grad

    def _place(self, rows: StepRows, bag: Bags) -> int:
        """Return the place of the padding among the table's rows of a step, or one that torch accepts in its stead."""
        mine, key = rows.keys[rows.of_table(bag.table)], bag.padding + self.tables.bases[bag.table]
        place = int(np.searchsorted(mine, key))
        if place < len(mine) and mine[place] == key:
            return place
        # With weights of samples, torch rounds sums in another way once there is a padding, in the batch or not.
        return -1 if bag.weights is None else len(mine)
