"""What a module of tables has in common: when gradients are applied, checkpoints, state_dict."""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Literal, ParamSpec, Self, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from memhier.arrays import as_ints
from memhier.errors import CorruptionError
from memhier.recsys.embedding.anchor import Anchor, refuse_scaled_losses
from memhier.recsys.embedding.bags import Bags
from memhier.recsys.embedding.fused import Sparse, StepGradient, apply_gradient, apply_sparse, pool
from memhier.recsys.embedding.initial import initial_weights
from memhier.recsys.embedding.merged import Pending, merged_gradients, parts_of
from memhier.recsys.embedding.optimizers import Group, SparseOptimizer, check_group
from memhier.recsys.embedding.passes import LookUp, Passes
from memhier.recsys.embedding.records import EXTRA, as_json, restored_hyperparameters
from memhier.recsys.embedding.tables import Ints, Rows, Tables, TableSpec
from memhier.shield import shielded
from memhier.store.segments import PAGE_BYTES

__all__ = ["EXTRA", "FusedOptimizer", "TableModule", "Update", "not_compiled"]

Update = Literal["backward", "step"]
_APPLIED = (
    "the gradients of the tables' rows cannot be read, clipped or unscaled: with update='backward' the backward pass "
    "applies them; open the tables with update='step', and call scale_gradients() and gradient_norm() of their module "
    "before module.optimizer.step(), with torch's functions for the parameters of the dense part alone"
)
_WAITING = (
    "the gradients of the tables' rows cannot be read, clipped or unscaled here: call scale_gradients() and "
    "gradient_norm() of their module before module.optimizer.step(), with torch's functions for the parameters of the "
    "dense part alone"
)

P = ParamSpec("P")
T = TypeVar("T")

_BLOCK = 4096


def not_compiled(forward: Callable[P, T]) -> Callable[P, T]:
    """Let `torch.compile` call a method as it is, and compile what is around: rows come and go behind its back."""
    # The public name would load the whole compiler at import.
    disabled: Callable[P, T] = _disable_dynamo(forward)
    return disabled


class FusedOptimizer(torch.optim.Optimizer):
    """Where the hyperparameters of the tables are, for learning-rate schedules, and what applies gradients on demand.

    Its one parameter group has the optimizer's fields by name; what it holds when gradients are applied counts. State
    lies with the rows, so `state_dict` holds the hyperparameters alone.
    """

    steps_rows = True

    def __init__(self, module: "TableModule", optimizer: SparseOptimizer) -> None:
        self._module = module
        super().__init__([module._anchor], dict(vars(optimizer)))

    def step(self, closure: Any = None) -> Any:
        """Apply the gradients of all backward passes since the last step, where the module waits for that.

        Raises
        ------
        RuntimeError
            Where the rows have had several updates since the last step, as they do not wait; where gradients wait that
            another's ``zero_grad()`` took for dropped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._module._step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that wait for a step."""
        self._module._zero_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a second group: all rows have the same hyperparameters."""
        if self.param_groups:
            raise ValueError("param_group: the optimizer of tables has one; give other parameters their own optimizer")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: Any) -> None:
        """Set the hyperparameters; state lies with the rows, and comes from their checkpoint.

        Raises
        ------
        ValueError
            For state, which is another optimizer's.
        """
        if state_dict["state"]:
            raise ValueError(
                "state_dict: has the state of rows, but here that lies with the rows: open the tables with resume=True"
            )
        super().load_state_dict(state_dict)


class TableModule(nn.Module):
    """A module whose tables lie in DRAM and on SSD, and which updates them itself.

    Its rows are no parameters, so no optimizer and no DDP sees them; an empty parameter stands for them, and
    ``requires_grad_(False)`` on the module or its model freezes the rows. By default a backward pass applies its
    gradients at its end, once: however many look-ups it goes through. A look-up that still waits for a backward pass of
    its own holds that off, until it has had it, its output is forgotten, or the tables are used again. With
    ``update="step"`` gradients wait for ``module.optimizer.step()``, so that several backward passes add up, as with
    micro-batches, and gradients can be scaled; the rows concerned stay in DRAM until then.
    """

    def __init__(self, tables: Tables, update: Update) -> None:
        super().__init__()
        self.tables = tables
        self._anchor = Anchor()
        self._anchor.stepping = self._before_other_step
        self._update: Update = update
        self._pending: list[Pending] = []
        self._passes = Passes(self._apply_pending, self._pass_failed, lambda: len(self._pending))
        self._applied = 0  # updates since an optimizer's last step
        self._planned: tuple[list[Ints | None], Rows] | None = None  # what lookahead has handed out
        self._end_epoch: Callable[[], None] | None = None
        self.optimizer = FusedOptimizer(self, tables.optimizer)
        try:
            if update not in get_args(Update):
                raise ValueError(f"update={update!r}: expected 'backward' or 'step'")
            self._anchor.is_applied_at_once = update == "backward"
            if update == "backward":
                refuse_scaled_losses()
            self._begun_with = self._restore_hyperparameters()
        except BaseException:
            tables.close()
            raise
        self._saved_steps = list(tables.record.steps)  # as of the last checkpoint

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
        self._close_step()
        return max(self.tables.record.steps, default=0)

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: see :meth:`memhier.table.tiered.Tiered.stats`.

        ``rows_per_page`` besides: how many of the rows that were needed came with each page of 4 KiB that was read, on
        average; 0 before the first read.
        """
        found = self.tables.stats()
        pages = found["read_bytes"] / PAGE_BYTES
        return found | {"rows_per_page": found["refetches"] / pages if pages else 0.0}

    def initial_weights(self, rows: Any, table: int = 0) -> Tensor:
        """Return what rows hold before they are first trained, float32 [n, dim]: to make the same table in memory."""
        spec = self.tables.specs[table]
        ids = as_ints("rows", rows)
        self.tables.check_ids(table, ids)
        return torch.from_numpy(initial_weights(spec.initial, self.tables.seed, table, ids, spec.dim, spec.rows))

    def weights(self, rows: Any, table: int = 0) -> Tensor:
        """Return rows as they are now, float32 [n, dim], a copy."""
        self._close_step()
        found = self.tables.read(table, as_ints("rows", rows))
        return torch.from_numpy(np.ascontiguousarray(found[..., : self.tables.specs[table].dim]))

    def optimizer_state(self, rows: Any, table: int = 0) -> Tensor:
        """Return the optimizer's state of rows, float32 [n, width], a copy."""
        self._close_step()
        found = self.tables.read(table, as_ints("rows", rows))
        return torch.from_numpy(np.ascontiguousarray(found[..., self.tables.specs[table].dim :]))

    @shielded
    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients that wait for a step; with ``update="step"``, RuntimeError otherwise."""
        self._check_waits("scale_gradients()")
        for one in self._pending:
            for _, gradient in one.sparse():
                gradient._values().mul_(factor)

    def gradient_norm(self) -> Tensor:
        """Return the Euclidean norm of the gradients that wait for a step; with ``update="step"``."""
        self._check_waits("gradient_norm()")
        gradients = merged_gradients(self.tables, self._pending)[1] if self._pending else []
        squares = [gradient.coalesce()._values().square().sum() for _, gradient in gradients]
        return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())

    def _check_waits(self, call: str) -> None:
        if self._update == "backward":
            raise RuntimeError(
                f"{call}: no gradients wait, as the backward pass applies them with update='backward'; open the tables "
                "with update='step'"
            )

    @shielded
    def checkpoint(self, extra: Mapping[str, Any] | None = None) -> int:
        """Make all tables durable as they are now, all or nothing.

        Parameters
        ----------
        extra
            Anything that JSON can hold, to be found in :attr:`extra` after a resume: where the loader is.

        Returns
        -------
        int
            The checkpoint's generation, rising.

        Raises
        ------
        RuntimeError
            When gradients wait for a step.
        ValueError
            When the optimizer's hyperparameters are none that a step could take.
        OSError
            With ``errno`` ENOSPC, EDQUOT or EFBIG, when the disk is full: make room and call again, nothing is lost. So
            it is with steps, whose rows push others out; one whose backward pass raised this has changed nothing.
        OSError, ClosedError
            When it could not be written otherwise; the last checkpoint is still there.
        """
        generation = self.tables.checkpoint(self._checkpoint_values(extra))
        self._saved_steps = list(self.tables.record.steps)
        return generation

    @shielded
    def start_checkpoint(self, extra: Mapping[str, Any] | None = None) -> "Future[int]":
        """Take a checkpoint of this moment, and make it durable on a thread while the training goes on.

        The call itself writes nothing; a row that is trained before the thread has written it is copied first.
        Arguments and errors as in :meth:`checkpoint`, those of the thread from the result.
        """
        steps = list(self.tables.record.steps)

        def note(done: "Future[int]") -> None:
            if done.exception() is None:
                self._saved_steps = steps

        future = self.tables.start_checkpoint(self._checkpoint_values(extra))
        future.add_done_callback(note)
        return future

    def _checkpoint_values(self, extra: Mapping[str, Any] | None) -> dict[str, bytes]:
        self._close_step()
        if self._pending:
            raise RuntimeError(f"{len(self._pending)} backward passes wait for optimizer.step(): take it first")
        group = {name: value for name, value in self.optimizer.param_groups[0].items() if name != "params"}
        check_group(self.tables.optimizer, group)
        return {EXTRA: as_json({"hyperparameters": group, "begun_with": self._begun_with, "extra": dict(extra or {})})}

    @property
    def extra(self) -> dict[str, Any]:
        """What the last checkpoint was given."""
        return dict(self._last_values().get("extra", {}))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Put a small tensor in place of each table's weights: bytes that say which checkpoint has them."""
        for name in self._weight_names():
            pointer = {"path": self.tables.path, "steps": self._saved_steps}
            destination[prefix + name] = torch.tensor([*json.dumps(pointer).encode()], dtype=torch.uint8)

    def _load_from_state_dict(
        self, state: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        """Check that a pointer names the checkpoint that was resumed; take weights in where there are any."""
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
            elif tuple(value.shape) != (spec.rows, spec.dim):
                errors.append(f"{prefix}{name}: expected [{spec.rows}, {spec.dim}], got {list(value.shape)}")
            else:
                for start in range(0, spec.rows, _BLOCK):
                    some = value[start : start + _BLOCK].detach().to(torch.float32).numpy()
                    self.tables.write(table, np.arange(start, start + len(some)), some)

    def _weight_names(self) -> list[str]:
        """Return the keys of the tables in a state dict."""
        raise NotImplementedError

    def _step(self) -> None:
        if self._update == "backward":
            self._close_step()
            self._check_one_update("module.optimizer.step()")
            return
        if self._pending and not self._anchor.is_marked:
            raise RuntimeError(
                f"{len(self._pending)} backward passes wait for module.optimizer.step(), but the model's zero_grad(), "
                "or that of another optimizer with all its parameters, came before it: take this step first, or call "
                "module.optimizer.zero_grad() to drop them"
            )
        self._apply_pending()
        self._anchor.grad = None

    def _zero_gradients(self) -> None:
        if self._update == "backward":
            self._close_step()  # to those who say no step the backward pass was one
        self._drop_pending()
        self._anchor.grad = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Refuse what would make other numbers of the rows, or move them; `to`, `half`, `cuda` and others call it."""
        found = fn(torch.zeros(1))
        name = type(self).__name__
        if found.dtype != torch.float32:
            raise TypeError(
                f"{name}: its rows are float32 and stay so, {found.dtype} was asked for: convert the dense part alone, "
                "such as model.dense.half(), or run it under torch.autocast"
            )
        if found.device.type != "cpu":
            raise ValueError(
                f"{name}: its rows stay in DRAM and on SSD, {found.device} was asked for: move the dense part alone, "
                f"and what the tables return, such as tables(ids).to({str(found.device)!r})"
            )
        return self

    @shielded
    def close(self) -> None:
        """Let go of threads, memory and files; what was trained since the last checkpoint is lost."""
        self._drop_pending()
        self.tables.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__}: has files and threads, so it cannot be copied or pickled: save its state_dict() "
            "after a checkpoint(), and open the folder with resume=True"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ids_of(self, *arguments: Any) -> list[Ints | None]:
        """Return the ids of each table in what the module is called with."""
        raise NotImplementedError

    def _distinct(self, ids: list[Ints | None]) -> Rows:
        """Return the distinct rows of what `_ids_of` said."""
        return self.tables.distinct(ids)

    def _make_room(self) -> None:
        """Let rows go, if there are any, that need not stay."""
        self._close_step()

    def _reading(self) -> AbstractContextManager[None]:
        """Return a context to read the loader in: other ranks, if there are any, hear where that fails."""
        return nullcontext()

    def _largest(self, size: int) -> int | None:
        """Return the largest of the sizes of all that must read their loaders in step; None for one that need not."""
        return None

    def _pooled(self, ids: list[Ints | None], bags: list[Bags]) -> Tensor:
        """Look up and pool what a step needs; `bags` get their indices here."""
        look_up = self._begin_look_up()
        trains = self._trains
        rows = self._rows_of(ids, trains)
        for bag in bags:
            if bag.padding >= 0:
                bag.padding = self._place(rows, bag)
        if trains:
            return pool(self.tables, rows, bags, self._anchor, partial(self._done, look_up))
        output = pool(self.tables, rows, bags, self._anchor, None)
        rows.release()
        return output

    @property
    def _trains(self) -> bool:
        """Whether rows that are looked up now will have a gradient."""
        return torch.is_grad_enabled() and self.training and self._anchor.requires_grad

    def _begin_look_up(self) -> LookUp | None:
        """End the step before; return what stands for the look-up until it has had its backward pass."""
        self._close_step()
        return self._passes.look_up() if self._trains and self._update == "backward" else None

    @shielded
    def _rows_of(self, ids: list[Ints | None], trains: bool) -> Rows:
        """Return the rows of a step, in DRAM: those that were fetched ahead where they are the ones."""
        if self._planned is not None and _are_equal(self._planned[0], ids):
            return self._planned[1].share()
        rows = self._distinct(ids)
        if self._planned is None and not self.tables.is_planned:
            self.tables.lend(rows)
        elif trains:
            raise RuntimeError(
                "input: other ids than lookahead's `ids` said of this batch, or its loop was left; call its close() to "
                "go on without it"
            )
        return rows

    def _place(self, rows: Rows, bag: Bags) -> int:
        """Return which of the step's rows the padding is; where it is not among them, one that torch takes as well."""
        mine, key = rows.keys[rows.of_table(bag.table)], bag.padding + self.tables.bases[bag.table]
        place = int(np.searchsorted(mine, key))
        if place < len(mine) and mine[place] == key:
            return place
        # Where samples have weights, torch adds with other roundings once there is a padding, in the batch or not.
        return -1 if bag.weights is None else len(mine)

    def _done(self, look_up: LookUp | None, step: StepGradient) -> None:
        self._await(look_up, step.rows, step if self._update == "backward" else step.sparse())

    def _await(self, look_up: LookUp | None, rows: Rows, gradient: StepGradient | Sparse) -> None:
        """Take the gradient of a look-up, inside of its backward pass."""
        if not self._anchor.requires_grad:
            rows.release()  # frozen since the forward pass
            return
        if self._update == "backward":
            self._passes.arriving(look_up)
        elif self._pending and not self._anchor.is_marked:
            self._drop_pending()  # as zero_grad() of the model means
        self._anchor.mark(_APPLIED if self._update == "backward" else _WAITING)
        self._pending.append(Pending(rows, gradient, self._passes.current()))

    def _close_step(self) -> None:
        """Where backward passes are steps, apply what they have left: whoever asks goes on from there."""
        if self._update == "backward" and not self._passes.is_inside():
            self._passes.forget_failed()
            self._apply_pending()

    def _pass_failed(self, before: int) -> None:
        for one in self._pending[before:]:
            one.rows.release()
        del self._pending[before:]

    @shielded
    @torch.no_grad()
    def _apply_pending(self) -> None:
        """Apply the gradients that wait, as those of one step."""
        if not self._pending:
            return
        group = self.optimizer.param_groups[0]
        pending, self._pending = self._pending, []
        applied = False
        try:
            check_group(self.tables.optimizer, group)
            first, *others = pending
            if not others and isinstance(first.gradient, StepGradient):
                apply_gradient(self.tables, first.gradient, group)
            else:
                self._apply_merged(pending, group)
            applied = True
        finally:
            if applied or self._update == "backward":
                # One that could not be applied can be made again.
                for one in pending:
                    one.rows.release()
            else:
                self._pending = pending
        self._applied += 1

    def _apply_merged(self, pending: list[Pending], group: Group) -> None:
        parts = parts_of(self.tables, *merged_gradients(self.tables, pending))
        for rows, _ in parts:
            if rows.loan is None:
                self.tables.lend_again(rows)
        late: list[int] | None = None
        for rows, gradients in parts:
            apply_sparse(self.tables, rows, gradients, group, late)
            late = list(self.tables.record.steps)
            rows.release()

    @shielded
    def _drop_pending(self) -> None:
        self._pass_failed(0)

    def _before_other_step(self) -> None:
        """An optimizer of all parameters of a model takes a step: it means one step of the rows."""
        self._close_step()
        self._check_one_update("optimizer.step()")

    def _check_one_update(self, call: str) -> None:
        applied, self._applied = self._applied, 0
        if self._update == "backward" and applied > 1:
            raise RuntimeError(
                f"{call}: the rows have had {applied} updates since the last one, as each backward pass is one with "
                "update='backward'; open the tables with update='step', where gradients add up until "
                "module.optimizer.step()"
            )

    def _last_values(self) -> dict[str, Any]:
        return self.tables.extra()

    def _restore_hyperparameters(self) -> dict[str, Any]:
        """Go on with the checkpoint's hyperparameters, if there is one; return those that the training began with."""
        optimizer, path = self.tables.optimizer, self.tables.path
        given: dict[str, Any] = restored_hyperparameters(json.loads(as_json(vars(optimizer))), vars(optimizer), path)
        values = self._last_values()
        if not values:
            return given
        saved = restored_hyperparameters(values["hyperparameters"], given, path)
        begun = restored_hyperparameters(values["begun_with"], given, path)
        try:
            type(optimizer)(**begun)
            check_group(optimizer, saved)
        except (TypeError, ValueError) as error:
            raise CorruptionError(f"{path}: value {EXTRA!r}: {error}") from error
        if self.tables.is_chosen and begun != given:
            name = next(name for name, value in given.items() if begun[name] != value)
            raise ValueError(
                f"optimizer: {name}={given[name]!r} beside resume=True, but the training began with {name}="
                f"{begun[name]!r} and is at {saved[name]!r}: pass {begun[name]!r}; then set "
                f"module.optimizer.param_groups[0][{name!r}] where it is to be another from here on"
            )
        self.optimizer.param_groups[0].update(saved)
        return begun


def _are_equal(some: list[Ints | None], others: list[Ints | None]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(one is other or (one is not None and np.array_equal(one, other)) for one, other in pairs)  # type: ignore[arg-type]
