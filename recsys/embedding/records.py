"""What a checkpoint says about its tables besides their rows: what they are, and how far the training has come."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from memhier.errors import FormatError
from memhier.recsys.embedding.optimizers import SparseOptimizer
from memhier.store import Store

if TYPE_CHECKING:
    from memhier.recsys.embedding.tables import TableSpec

__all__ = ["KEY", "TableRecord", "as_json", "checkpoint_of"]

KEY = "recsys/tables"
"""Where a checkpoint has the record of its tables."""


class TableRecord:
    """The value ``recsys/tables`` of a store's catalog: JSON.

    Attributes
    ----------
    steps
        Updates of each table so far, which Adam's and Adagrad's rates depend on.
    checkpoint
        The number of the last checkpoint, from 1; 0 before the first.
    """

    def __init__(self, made: dict[str, Any], steps: list[int], checkpoint: int = 0) -> None:
        self._made = made
        self.steps = steps
        self.checkpoint = checkpoint

    @classmethod
    def read(
        cls, store: Store, specs: Sequence["TableSpec"], optimizer: SparseOptimizer, seed: int, resume: bool
    ) -> "TableRecord":
        """Return what a store's last checkpoint says; a new record where there is none.

        Raises
        ------
        FileExistsError
            When there is a checkpoint and `resume` is False.
        FormatError
            When it is of other tables.
        """
        state = [optimizer.state_width(spec.dim) for spec in specs]
        tables = [
            {"name": spec.name, "rows": spec.rows, "dim": spec.dim, "initial": _described(spec.initial)}
            for spec in specs
        ]
        made = {"tables": tables, "seed": seed, "optimizer": type(optimizer).__name__, "state": state}
        made["first_state"] = optimizer.first_state()
        found = store.get(KEY)
        if found is None:
            return cls(made, [0] * len(specs))
        there = json.loads(found)
        if not resume:
            raise FileExistsError(
                f"{store.path}: holds a checkpoint after {max(there['steps'], default=0)} updates; pass resume=True to "
                "go on from it, or another path"
            )
        for key, expected in made.items():
            if there["made"].get(key) != expected:
                raise FormatError(f"{store.path}: {key}={there['made'].get(key)!r} there, expected {expected!r}")
        return cls(made, there["steps"], checkpoint_of(found))

    def values(self) -> dict[str, bytes]:
        """Return what the next checkpoint has to say."""
        self.checkpoint += 1
        return {KEY: as_json({"made": self._made, "steps": self.steps, "checkpoint": self.checkpoint})}


def checkpoint_of(record: bytes | None) -> int:
    """Return the number of the checkpoint that has this record, 0 where there is none."""
    # Records of before there were numbers have none.
    return 0 if record is None else int(json.loads(record).get("checkpoint", 1))


def as_json(value: Any) -> bytes:
    """Return a value as JSON, numbers of numpy and torch as Python's."""
    return json.dumps(value, default=_number).encode()


def _number(value: Any) -> Any:
    if not hasattr(value, "item"):
        raise TypeError(f"{value!r}: expected what JSON can hold")
    return value.item()


def _described(initial: Any) -> dict[str, Any]:
    return {"kind": type(initial).__name__, **asdict(initial)}
