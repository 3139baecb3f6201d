"""Look-ups of tables: the rows that they take, and the gradients that they leave.

A step may look its tables up several times, and autograd comes back to each look-up on its own. An optimizer with state
needs the sum of the gradients. So gradients wait until their backward pass has ended, and until every look-up has had
its pass or was forgotten with its output. Then they are applied once.
"""

import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from memhier.recsys.embedding.anchor import Anchor, refuse_scaled_losses
from memhier.recsys.embedding.groups.step_loan import StepTicket
from memhier.recsys.embedding.optimizers import adds_in_turn
from memhier.recsys.embedding.pooling import Gradient, Sparse, StepGradient, apply_gradient, apply_sparse
from memhier.recsys.embedding.tables import Ints, StepRows, Tables
from memhier.recsys.embedding.torch_internals import (
    current_pass,
    indices_of,
    row_sums,
    sparse_rows,
    values_of,
    when_pass_ends,
)
from memhier.shield import shielded
from memhier.store.segments import FullError

__all__ = ["FusedOptimizer", "LookUp", "LookUps", "Pending"]

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


class LookUp:
    """A look-up that waits for its backward pass; ends with the graph that holds it."""

    __slots__ = ("__weakref__", "rows")

    def __init__(self) -> None:
        self.rows: StepRows | None = None


class Pending:
    """The gradient of a look-up that is not applied yet; `graph_pass` numbers the backward pass that brought it."""

    __slots__ = ("gradient", "graph_pass", "rows")

    def __init__(self, rows: StepRows, gradient: Gradient, graph_pass: int) -> None:
        self.rows: StepRows = rows
        self.gradient: Gradient = gradient
        self.graph_pass: int = graph_pass

    @property
    def is_coming(self) -> bool:
        """Whether the gradient is on its way from a device."""
        return not isinstance(self.gradient, list) and self.gradient.is_coming

    def sparse(self) -> Sparse:
        """Return the gradient of rows, once it is there; always the same tensors."""
        if not isinstance(self.gradient, list):
            self.gradient = self.gradient.sparse()
        return self.gradient


class LookUps:
    """The look-ups of a module of tables.

    The ids of a batch have the type that `ids_of` returns; a subclass may choose another one.

    Parameters
    ----------
    tables
        The tables, whose options say when gradients are applied.
    ids_of
        Returns the ids of each table, int64 [n], in the arguments of the module.

    Attributes
    ----------
    anchor
        The parameter that stands for the rows.
    optimizer
        The optimizer that a user sees.
    update
        ``"backward"`` or ``"step"``: the moment when gradients are applied.
    planned
        Ids and rows of the batch that lookahead has handed out.
    reads_in_turn
        Whether the batches of an epoch have to be known one after the other, even if no row has to be fetched.
    """

    reads_in_turn = False

    def __init__(self, tables: Tables, ids_of: Callable[..., list[Ints]]) -> None:
        self.tables = tables
        self.update = update = tables.options.update
        self.anchor: Anchor = Anchor()
        self.anchor.stepping = self.before_other_step
        self.anchor.is_applied_at_once = update == "backward"
        if update == "backward":
            refuse_scaled_losses()
        self.optimizer: FusedOptimizer = FusedOptimizer(self)
        self.planned: tuple[Any, StepRows] | None = None
        self._ids_of = ids_of
        self._pending: list[Pending] = []
        # Updates since an optimizer's last step or zero_grad(), one that is put off included.
        self._applied = 0
        # Updates that a zero_grad() left without a step since an optimizer's last one; the steps in a row with some.
        self._left, self._after_left = 0, 0
        # Hyperparameters of the last pass, if its update is put off until its gradients have come from a device.
        self._put_off: list[dict[str, Any]] | None = None
        self._waiting: WeakSet[LookUp] = WeakSet()  # for their backward pass
        # By thread and number of a backward pass: the number of pending gradients when it began.
        self._passes: dict[tuple[int, int], int] = {}

    # Rows.

    def ids_of(self, *arguments: Any) -> Any:
        """Return the ids of a batch to come, from the arguments that the module will get."""
        return self._ids_of(*arguments)

    def ids_of_all(self, look_ups: Sequence[tuple[Any, ...]]) -> Any:
        """Return the ids of several look-ups of a batch to come, from the arguments of each."""
        each = [self._ids_of(*arguments) for arguments in look_ups]
        return [np.concatenate(of_table) for of_table in zip(*each, strict=True)]

    def distinct(self, ids: Any) -> StepRows:
        """Return the distinct rows of a batch."""
        return self.tables.distinct(ids)

    def are_equal(self, ids: Any, others: Any) -> bool:
        """Whether two batches have the same ids."""
        return all(map(np.array_equal, ids, others))

    def reading(self) -> AbstractContextManager[None]:
        """Return a context to read a loader in; it tells other ranks, if any, of a failure."""
        return nullcontext()

    def agree(self, size: int) -> int | None:
        """Return the largest of the sizes that all ranks say; None if no other rank reads in step."""
        return None

    def bytes_of(self, ids: Any) -> int:
        """Return the DRAM that a batch to come takes beside its ids and rows."""
        return 0

    def map_ahead(self, trains: bool) -> None:
        """Say whether the batches that are read from now on are for training."""

    def drop_ahead(self) -> None:
        """Forget the batches that were read ahead."""

    def plan(self, ids: Any, rows: StepRows, ticket: StepTicket | None) -> None:
        """Load the rows of a batch that lookahead hands out, and use them for the look-ups of its ids."""
        self.tables.lend(rows, ticket)
        self.planned = ids, rows

    def end_plan(self) -> None:
        """Release the rows of the batch that was handed out last."""
        planned, self.planned = self.planned, None
        if planned is not None:
            planned[1].release()

    @shielded
    def rows_of(self, ids: Any, trains: bool, admits: bool = False) -> StepRows:
        """Return the rows of a step, in DRAM; rows that are only read while batches are announced get no loan."""
        if self.planned is not None and self.are_equal(self.planned[0], ids):
            return self.planned[1].share()
        rows = self.distinct(ids)
        self.lend(rows, trains)
        return rows

    def lend(self, rows: StepRows, trains: bool) -> None:
        """Load the rows of a look-up, or take them from those of the batch that was handed out."""
        if self.planned is None and not self.tables.is_planned:
            self.tables.lend(rows)
        elif (self.planned is None or not self.planned[1].lend(rows)) and trains:
            raise RuntimeError(
                "input: other ids than lookahead's `ids` said of this batch, or its loop was left; let `ids` return a "
                "list of the arguments of all look-ups of a batch, or call close() to go on without it"
            )

    def rows_awaited(self) -> list[StepRows]:
        """Return the rows of look-ups whose gradients wait or may come."""
        coming = [look_up.rows for look_up in self._waiting if look_up.rows is not None]
        return [*(one.rows for one in self._pending), *coming]

    # Gradients.

    @property
    def waiting(self) -> int:
        """The number of gradients that are not applied yet, without those of a step that was left."""
        return len(self._pending) if self.update == "backward" or self.anchor.is_marked else 0

    def begin(self, trains: bool) -> LookUp | None:
        """End the step before, and note a look-up that will have a backward pass of its own.

        Amid a backward pass, which computes activations again, there is no such look-up: its rows must be as they were
        in the forward pass, so no gradient is applied before the outer pass ends.
        """
        self.end_step()
        if not trains:
            return None
        self._drop_zeroed()
        if self.update == "backward" and current_pass() >= 0:
            self._await_end()
            return None
        look_up = LookUp()
        self._waiting.add(look_up)
        return look_up

    def take(self, look_up: LookUp | None, rows: StepRows, gradient: Gradient) -> None:
        """Take the gradient of a look-up, amid its backward pass."""
        if not self.anchor.requires_grad:
            rows.release()  # frozen since the forward pass
            return
        if look_up is not None:
            self._waiting.discard(look_up)
        self._drop_zeroed()
        if self.update == "backward":
            self._await_end()
        elif not isinstance(gradient, list) and not gradient.is_coming:
            gradient = gradient.sparse()
        self.anchor.mark(_APPLIED if self.update == "backward" else _WAITING)
        self.add(rows, gradient, current_pass())

    def add(self, rows: StepRows, gradient: Gradient, graph_pass: int) -> None:
        """Let a gradient wait with those of its step."""
        self._pending.append(Pending(rows, gradient, graph_pass))

    def end_step(self) -> None:
        """Apply the gradients that backward passes have left, if each of them is a step."""
        if self.update == "step" or current_pass() >= 0:
            return
        thread = threading.get_ident()
        failed = [key for key in self._passes if key[0] == thread]
        if failed:
            self.drop(min(self._passes.pop(key) for key in failed))
        self.apply()

    def _drop_zeroed(self) -> None:
        """Drop the gradients that the model's zero_grad() was for, which may come in place of a step that was left."""
        if self.anchor.is_marked:
            return
        if self.update == "step":
            self.drop()
        else:
            self._leave_step()

    def _leave_step(self) -> None:
        """Let the updates since the last step be those of a step that was left."""
        self._left, self._applied = self._left + self._applied, 0

    def settle(self) -> None:
        """Apply all gradients that need not wait, those under way from other ranks included; let their rows go."""
        self.end_step()

    def catch_up(self) -> None:
        """Apply the update that was put off, if any, which lets its rows go."""
        if self._put_off is not None:
            self.apply()

    def apply(self) -> None:
        """Apply the gradients that wait, as those of one step."""
        if self._pending:
            self._apply_pending()

    @shielded
    def drop(self, first: int = 0) -> None:
        """Drop the gradients that wait, from the `first` on."""
        for one in self._pending[first:]:
            one.rows.release()
        del self._pending[first:]
        if not self._pending:
            self._put_off = None

    def close(self) -> None:
        """Drop all gradients."""
        self.drop()

    def _await_end(self) -> None:
        key = (threading.get_ident(), current_pass())
        if key not in self._passes:
            self.catch_up()
            self._passes[key] = len(self._pending)
            when_pass_ends(partial(self._end_pass, key))

    def _end_pass(self, key: tuple[int, int]) -> None:
        self._passes.pop(key, None)
        if self._passes or self._waiting:
            return
        if any(one.is_coming for one in self._pending):
            self._put_update_off()
        else:
            self.apply()

    @shielded
    def _put_update_off(self) -> None:
        """Let the caller start the dense part's step while gradients come; the next use of the tables waits."""
        groups = [dict(group) for group in self.optimizer.param_groups]
        try:
            self.tables.rules.check(groups)
        except BaseException:
            self.drop()
            raise
        self._put_off = groups
        self._applied += 1

    @shielded
    @torch.no_grad()
    def _apply_pending(self) -> None:
        put_off = self._put_off
        groups = self.optimizer.param_groups if put_off is None else put_off
        pending, self._pending = self._pending, []
        kept = self.update == "step"  # otherwise a backward pass that failed can be made again
        try:
            first = pending[0].gradient
            if len(pending) == 1 and isinstance(first, StepGradient):
                apply_gradient(self.tables, first, groups)
            else:
                self.tables.rules.check(groups)
                late: list[int] | None = None
                for rows, gradients in _in_parts(self.tables, *_merged(self.tables, pending)):
                    apply_sparse(self.tables, rows, gradients, groups, late)
                    late = list(self.tables.record.steps)
                    rows.release()
            kept = False
        except FullError:
            kept |= put_off is not None  # that pass has ended
            raise
        finally:
            if kept:
                self._pending = pending
            else:
                self._put_off = None
                for one in pending:
                    one.rows.release()
        self._applied += put_off is None

    # The step of an optimizer.

    def step(self) -> None:
        """Take the step of `module.optimizer`."""
        if self.update == "backward":
            self.end_step()
            self._check_one_update("module.optimizer.step()")
            return
        if self._pending and not self.anchor.is_marked:
            raise RuntimeError(
                f"{len(self._pending)} backward passes wait for module.optimizer.step(), but the model's zero_grad(), "
                "or that of another optimizer with all its parameters, came before it: take this step first, or call "
                "module.optimizer.zero_grad() to drop them"
            )
        self.apply()
        self.anchor.grad = None

    def zero(self) -> None:
        """Drop gradients that wait for a step; a backward pass that is a step is applied."""
        self.end_step()
        self.drop()
        self._leave_step()
        self.anchor.grad = None

    def before_other_step(self) -> None:
        """Note that an optimizer of all parameters of a model takes a step, which means one step of the rows."""
        if self._put_off is None:
            self.end_step()
        self._check_one_update("optimizer.step()")

    def scale(self, factor: float) -> None:
        """Multiply the gradients that wait for a step."""
        self._check_waits("scale_gradients()")
        for one in self._pending:
            for _, gradient in one.sparse():
                values_of(gradient).mul_(factor)

    def norm(self) -> Tensor:
        """Return the Euclidean norm of the gradients that wait for a step."""
        self._check_waits("gradient_norm()")
        gradients = _merged(self.tables, self._pending)[1] if self.waiting else []
        squares = [values_of(gradient.coalesce()).square().sum() for _, gradient in gradients]
        return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())

    def _check_waits(self, call: str) -> None:
        if self.update == "backward":
            raise RuntimeError(
                f"{call}: no gradients wait, as the backward pass applies them with update='backward'; open the tables "
                "with update='step'"
            )

    def _check_one_update(self, call: str) -> None:
        applied, self._applied = self._applied, 0
        if self.update == "step" or not applied:
            return
        left, self._left = self._left, 0
        self._after_left = self._after_left + 1 if left else 0
        # One step may have been left; one before each step is a way to train, which torch does without those updates.
        if applied > 1 or self._after_left > 1:
            self._after_left = 0
            raise RuntimeError(
                f"{call}: the rows have had {applied + left} updates since the last one, as each backward pass is one "
                "with update='backward', which zero_grad() does not take back; open the tables with update='step', "
                "where gradients add up until module.optimizer.step()"
            )
        if left:
            warnings.warn(
                f"{call}: the rows keep the updates of {left} backward passes whose gradients were zeroed before a "
                "step, as each pass is one with update='backward'; use update='step' to have them dropped",
                stacklevel=2,
            )


class FusedOptimizer(torch.optim.Optimizer):
    """Holds the hyperparameters of the tables, for learning-rate schedules, and applies gradients on demand.

    Its one parameter group has the optimizer's fields by name; an update uses their values of that moment. Where each
    table has its own optimizer, there is a group for each, in the order of tables, with its ``name``. State lies with
    the rows, so `state_dict` holds the hyperparameters alone.
    """

    steps_rows = True

    def __init__(self, look_ups: LookUps) -> None:
        self._look_ups = look_ups
        rules = look_ups.tables.rules
        first, *others = rules.groups()
        self._room = 1 + len(others)
        # One parameter stands for the rows of all tables. Schedules look at the defaults of an optimizer for all.
        groups = [{"params": [look_ups.anchor], **first}, *({"params": [], **group} for group in others)]
        super().__init__(groups, {} if rules.by_name else first)

    def step(self, closure: Any = None) -> Any:
        """Apply the gradients of all backward passes since the last step, with ``update="step"``.

        Raises
        ------
        RuntimeError
            If the rows do not wait for a step and have had several updates since the last one; if gradients wait that
            the ``zero_grad()`` of another optimizer meant to drop.

        Warns
        -----
        UserWarning
            If the rows do not wait for a step and keep an update whose gradients were zeroed before a step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._look_ups.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that wait for a step."""
        self._look_ups.zero()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse further groups: no other parameters are trained here."""
        if len(self.param_groups) == self._room:
            there = "one" if self._room == 1 else str(self._room)
            raise ValueError(
                f"param_group: the optimizer of tables has {there}; give other parameters their own optimizer"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: Any) -> None:
        """Set the hyperparameters; state lies with the rows, and comes from their checkpoint.

        Raises
        ------
        ValueError
            For a state dict with state, which belongs to another optimizer.
        """
        if state_dict["state"]:
            raise ValueError(
                "state_dict: has the state of rows, but here that lies with the rows: open the tables with resume=True"
            )
        super().load_state_dict(state_dict)


def _merged(tables: Tables, pending: Sequence[Pending]) -> tuple[StepRows, Sparse]:
    """Return the rows of several look-ups, which are not lent, and their sums; one look-up stays as it is."""
    if len(pending) == 1:
        return pending[0].rows, pending[0].sparse()
    held = [
        np.concatenate([one.rows.keys[one.rows.of_table(table)] for one in pending]) - tables.bases[table]
        for table in range(len(tables.specs))
    ]
    together = tables.distinct(held)
    # torch adds up the look-ups of a pass, and then adds the sum to that of the passes that ended before.
    passes: dict[int, dict[int, Tensor]] = {}
    for one in pending:
        sums = passes[one.graph_pass] = passes.pop(one.graph_pass, {})
        for table, gradient in one.sparse():
            # torch adds in the order of rows; a sparse tensor need not be as long as the table for that.
            of_all = together.keys[together.of_table(table)]
            places = torch.from_numpy(np.searchsorted(of_all, one.rows.keys[one.rows.of_table(table)]))
            shape = (len(of_all), tables.specs[table].dim)
            make = row_sums if tables.adds_by_row else sparse_rows
            whole = make(places[indices_of(gradient)[0]], values_of(gradient), shape)
            sums[table] = sums[table] + whole if table in sums else whole
    total: dict[int, Tensor] = {}
    for sums in passes.values():
        for table, whole in sums.items():
            total[table] = total[table] + whole if table in total else whole
    return together, [*total.items()]


def _in_parts(tables: Tables, rows: StepRows, gradients: Sparse) -> list[tuple[StepRows, Sparse]]:
    """Return rows, lent, and gradients in parts that a call has room for."""
    most = tables.call_rows
    if len(rows.keys) <= most:
        found = [(rows, gradients)]
    else:
        # The order of the sums must not depend on the parts.
        gradients = [
            (table, gradient if adds_in_turn(tables.rules.of[table]) else gradient.coalesce())
            for table, gradient in gradients
        ]
        found = [_part(rows, gradients, begin, most) for begin in range(0, len(rows.keys), most)]
    for part, _ in found:
        if part.loan is None:
            tables.lend_again(part)
    return found


def _part(rows: StepRows, gradients: Sparse, begin: int, most: int) -> tuple[StepRows, Sparse]:
    keys = rows.keys[begin : begin + most].copy()
    starts = np.clip(rows.starts - begin, 0, len(keys))
    mine = []
    for table, gradient in gradients:
        count = int(starts[table + 1] - starts[table])
        first = int(begin + starts[table] - rows.starts[table])
        places = indices_of(gradient)[0]
        inside = (places >= first) & (places < first + count)
        shape = (count, gradient.shape[1])
        mine.append((table, sparse_rows(places[inside] - first, values_of(gradient)[inside], shape)))
    return StepRows(keys, starts), mine
