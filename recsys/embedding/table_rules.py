"""The optimizer of each table: one for all, or one by name."""

from collections.abc import Mapping, Sequence
from typing import Any

from memhier.recsys.embedding.optimizers import SGD, Group, Kernel, SparseOptimizer, check_group

__all__ = ["Optimizers", "TableRules", "rules_in"]

Optimizers = SparseOptimizer | Mapping[str, SparseOptimizer]


class TableRules:
    """The optimizers of tables, and their hyperparameters: a group for all tables, or one for each.

    Parameters
    ----------
    optimizer
        One for all tables; or by the name of each; None is plain descent.
    names
        Of the tables.

    Attributes
    ----------
    of
        The optimizer of each table.
    by_name
        Whether each table has its own group.

    Raises
    ------
    ValueError
        For a table without an optimizer, or a name without a table.
    """

    def __init__(self, optimizer: Optimizers | None, names: Sequence[str]) -> None:
        self.by_name: bool = isinstance(optimizer, Mapping)
        self.of: tuple[SparseOptimizer, ...]
        self._names = list(names)
        if not isinstance(optimizer, Mapping):
            self.of = (SGD() if optimizer is None else optimizer,) * len(self._names)
            return
        if {*optimizer} != {*names}:
            raise ValueError(f"optimizer: expected one for each of {sorted(names)}, got {sorted(optimizer)}")
        self.of = tuple(optimizer[name] for name in names)

    def groups(self) -> list[Group]:
        """Return the groups of hyperparameters to begin with; where each table has one, with its ``name``."""
        if not self.by_name:
            return [dict(vars(self.of[0]))]
        return [{"name": name, **vars(rule)} for name, rule in zip(self._names, self.of, strict=True)]

    def group(self, groups: Sequence[Group], table: int) -> Group:
        """Return the group of a table."""
        return groups[table if self.by_name else 0]

    def check(self, groups: Sequence[Group]) -> None:
        """Raise ValueError for hyperparameters that an optimizer does not take; see `check_group`."""
        for number, group in enumerate(groups):
            check_group(self.of[number], group, number)

    def kernels(self, groups: Sequence[Group], counts: Sequence[int]) -> list[Kernel] | None:
        """Return the compiled rule of each table, updated `counts` times so far; None if one call cannot do them all.

        Raises
        ------
        ValueError
            As :meth:`check`.
        """
        self.check(groups)
        found = [rule.kernel(self.group(groups, table), counts[table] + 1) for table, rule in enumerate(self.of)]
        known = [kernel for kernel in found if kernel is not None]
        return known if len(known) == len(found) and len({kernel[0] for kernel in known}) == 1 else None

    def described(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Return hyperparameters for a checkpoint: of all tables, or by the name of each."""
        plain = [{key: value for key, value in group.items() if key not in ("params", "name")} for group in groups]
        return dict(zip(self._names, plain, strict=True)) if self.by_name else plain[0]

    def parted(self, described: Mapping[str, Any]) -> list[Any]:
        """Return the hyperparameters of each group, as :meth:`described` put them together; None for one missing."""
        return [described.get(name) for name in self._names] if self.by_name else [described]


def rules_in(optimizer: Optimizers | None) -> list[SparseOptimizer]:
    """Return all optimizers."""
    if isinstance(optimizer, Mapping):
        return [*optimizer.values()]
    return [SGD() if optimizer is None else optimizer]
