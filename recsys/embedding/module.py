"""What a module of tables has in common: when gradients are applied, checkpoints, state_dict."""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Literal, ParamSpec, Self, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from memhier._arrays import as_ints
from memhier._segments import PAGE_BYTES
from memhier.recsys.embedding.bags import Bags
from memhier.recsys.embedding.fused import Sparse, StepGradient, apply_gradient, apply_sparse, pool
from memhier.recsys.embedding.initial import initial_weights
from memhier.recsys.embedding.optimizers import SparseOptimizer
from memhier.recsys.embedding.records import as_json
from memhier.recsys.embedding.tables import Ints, Rows, Tables, TableSpec

__all__ = ["EXTRA", "FusedOptimizer", "TableModule", "Update", "not_compiled"]

Update = Literal["backward", "step"]
P = ParamSpec("P")
T = TypeVar("T")

EXTRA = "recsys/extra"
"""Where a checkpoint has the hyperparameters, and what the caller gave it."""

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

    def __init__(self, module: "TableModule", optimizer: SparseOptimizer) -> None:
        self._module = module
        super().__init__([module._anchor], dict(vars(optimizer)))

    def step(self, closure: Any = None) -> Any:
        """Apply the gradients of all backward passes since the last step, where the module waits for that."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._module._apply_pending()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that were not applied."""
        self._module._drop_pending()


class TableModule(nn.Module):
    """A module whose tables lie in DRAM and on SSD, and which updates them itself.

    Its rows are no parameters, so no optimizer and no DDP sees them. By default a backward pass applies its gradients;
    with ``update="step"`` they wait for ``module.optimizer.step()``, so that several backward passes add up and
    gradients can be scaled; the rows concerned stay in DRAM until then. That is also the way for a model that looks up
    several times in one forward pass: by default each of these look-ups is an update of its own.
    """

    def __init__(self, tables: Tables, update: Update) -> None:
        super().__init__()
        if update not in get_args(Update):
            raise ValueError(f"update={update!r}: expected 'backward' or 'step'")
        self.tables = tables
        self._anchor = torch.zeros((), requires_grad=True)
        self._update: Update = update
        self._pending: list[tuple[Rows, Sparse]] = []
        self._planned: tuple[list[Ints | None], Rows] | None = None  # what lookahead has handed out
        self.optimizer = FusedOptimizer(self, tables.optimizer)
        self._restore_hyperparameters()
        self._saved_steps = list(tables.record.steps)  # as of the last checkpoint

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
        return max(self.tables.record.steps, default=0)

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: see :meth:`memhier.tiered.Tiered.stats`.

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
        found = self.tables.read(table, as_ints("rows", rows))
        return torch.from_numpy(np.ascontiguousarray(found[..., : self.tables.specs[table].dim]))

    def optimizer_state(self, rows: Any, table: int = 0) -> Tensor:
        """Return the optimizer's state of rows, float32 [n, width], a copy."""
        found = self.tables.read(table, as_ints("rows", rows))
        return torch.from_numpy(np.ascontiguousarray(found[..., self.tables.specs[table].dim :]))

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients that wait for a step; with ``update="step"``."""
        for _, gradients in self._pending:
            for _, gradient in gradients:
                gradient._values().mul_(factor)

    def gradient_norm(self) -> Tensor:
        """Return the Euclidean norm of the gradients that wait for a step; with ``update="step"``."""
        merged = self._merged()
        squares = [gradient.coalesce()._values().square().sum() for _, parts in merged for _, gradient in parts]
        return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())

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
        OSError, ClosedError
            When it could not be written; the last checkpoint is still there.
        """
        generation = self.tables.checkpoint(self._checkpoint_values(extra))
        self._saved_steps = list(self.tables.record.steps)
        return generation

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
        if self._pending:
            raise RuntimeError(f"{len(self._pending)} backward passes wait for optimizer.step(): take it first")
        group = {name: value for name, value in self.optimizer.param_groups[0].items() if name != "params"}
        return {EXTRA: as_json({"hyperparameters": group, "extra": dict(extra or {})})}

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

    def _reading(self) -> AbstractContextManager[None]:
        """Return a context to read the loader in: other ranks, if there are any, hear where that fails."""
        return nullcontext()

    def _largest(self, size: int) -> int | None:
        """Return the largest of the sizes of all that must read their loaders in step; None for one that need not."""
        return None

    def _pooled(self, ids: list[Ints | None], bags: list[Bags]) -> Tensor:
        """Look up and pool what a step needs; `bags` get their indices here."""
        trains = torch.is_grad_enabled() and self.training
        rows = self._rows_of(ids, trains)
        for bag in bags:
            if bag.padding >= 0:
                bag.padding = self._place(rows, bag.table, bag.padding)
        if trains:
            return pool(self.tables, rows, bags, self._anchor, self._done)
        with torch.no_grad():
            output = pool(self.tables, rows, bags, self._anchor, self._done)
        rows.release()
        return output

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

    def _place(self, rows: Rows, table: int, row: int) -> int:
        """Return which of the step's rows a row is, -1 where it is not among them."""
        mine = rows.keys[rows.of_table(table)]
        place = int(np.searchsorted(mine, row + self.tables.bases[table]))
        return place if place < len(mine) and mine[place] == row + self.tables.bases[table] else -1

    def _done(self, step: StepGradient) -> None:
        if self._update == "step":
            self._pending.append((step.rows, step.sparse()))
            return
        apply_gradient(self.tables, step, self.optimizer.param_groups[0])
        step.rows.release()

    def _apply_pending(self) -> None:
        for rows, gradients in self._merged():
            if rows.loan is None:
                self.tables.lend_again(rows)
            apply_sparse(self.tables, rows, gradients, self.optimizer.param_groups[0])
            rows.release()
        self._drop_pending()

    def _drop_pending(self) -> None:
        pending, self._pending = self._pending, []
        for rows, _ in pending:
            rows.release()

    def _merged(self) -> list[tuple[Rows, Sparse]]:
        """Return the gradients that wait as those of one step, added up as torch adds sparse gradients."""
        if len(self._pending) < 2:
            return self._pending
        tables = self.tables
        held = [
            np.concatenate([rows.keys[rows.of_table(table)] for rows, _ in self._pending]) - tables.bases[table]
            for table in range(len(tables.specs))
        ]
        together = tables.distinct([*held])
        of_table: dict[int, Tensor] = {}
        for rows, gradients in self._pending:
            for table, gradient in gradients:
                # In the order of rows, as torch adds them up by; a tensor as long as the table may be none at all.
                of_all = together.keys[together.of_table(table)]
                places = torch.from_numpy(np.searchsorted(of_all, rows.keys[rows.of_table(table)]))
                shape = (len(of_all), tables.specs[table].dim)
                whole = _sparse(places[gradient._indices()[0]], gradient._values(), shape)
                of_table[table] = of_table[table] + whole if table in of_table else whole
        return [(together, [*of_table.items()])]

    def _last_values(self) -> dict[str, Any]:
        found = self.tables.value(EXTRA)
        values: dict[str, Any] = {} if found is None else json.loads(found)
        return values

    def _restore_hyperparameters(self) -> None:
        for name, value in self._last_values().get("hyperparameters", {}).items():
            self.optimizer.param_groups[0][name] = tuple(value) if isinstance(value, list) else value


def _are_equal(some: list[Ints | None], others: list[Ints | None]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(one is other or (one is not None and np.array_equal(one, other)) for one, other in pairs)  # type: ignore[arg-type]


def _sparse(indices: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    return torch.sparse_coo_tensor(indices.unsqueeze(0), values, shape, check_invariants=False)
