"""EmbeddingBagCollection: many tables behind one plan, with the configurations and features of TorchRec."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from memhier.arguments import check_int
from memhier.policies import Policy
from memhier.recsys.embedding.ids.hash64 import IdSpace
from memhier.recsys.embedding.initial import Initial, TableSpec, Uniform
from memhier.recsys.embedding.mapped_look_ups import look_ups_of
from memhier.recsys.embedding.module import TableModule
from memhier.recsys.embedding.pooling import MODES, Bags
from memhier.recsys.embedding.single.bag import as_bags
from memhier.recsys.embedding.single.one_table import ROWS_MAX
from memhier.recsys.embedding.table_rules import Optimizers
from memhier.recsys.embedding.tables import Ints, TableOptions, Tables, Update, check_ids
from memhier.recsys.embedding.torch_internals import not_compiled
from memhier.recsys.embedding.torchrec_types import (
    check_keyed_jagged,
    initial_of_torchrec,
    is_of_torchrec,
    keyed_tensor,
)

__all__ = ["EmbeddingBagCollection", "EmbeddingBagConfig", "FeatureParser", "Pooled"]

ASKED = "features of table {!r}"
"""The argument that holds the ids of a table, for messages."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingBagConfig:
    """One table, with the fields of TorchRec's configuration.

    Attributes
    ----------
    name
        The name of the table, unique.
    num_embeddings, embedding_dim
        The number of rows, and of weights in each.
    feature_names
        The features that look the table up; by default one with the table's name.
    pooling
        ``"sum"`` or ``"mean"``.
    initial
        The weights of untrained rows; by default TorchRec's.
    id_space
        ``"hash64"``, or :class:`Hash64`, for any ids; see :class:`EmbeddingBag`.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from memhier.recsys import EmbeddingBagCollection, EmbeddingBagConfig
    >>> items = EmbeddingBagConfig(
    ...     name="item", num_embeddings=1000, embedding_dim=4, feature_names=["seen", "bought"], pooling="mean"
    ... )
    >>> with EmbeddingBagCollection([items], dram="32MiB", path=tempfile.mkdtemp()) as tables:
    ...     list(tables({"seen": torch.tensor([[1, 2, 3]]), "bought": torch.tensor([[2]])}))
    ['seen', 'bought']
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: Sequence[str] = ()
    pooling: Literal["sum", "mean"] = "sum"
    initial: Initial = field(default_factory=Uniform)
    id_space: IdSpace = "rows"


class Pooled(Mapping[str, Tensor]):
    """Pooled rows by feature, like TorchRec's KeyedTensor: ``pooled[name]`` is float32 [samples, dim].

    A collection of tables returns it.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from memhier.recsys import EmbeddingBagCollection, EmbeddingBagConfig
    >>> configs = [EmbeddingBagConfig(name=name, num_embeddings=100, embedding_dim=4) for name in ("user", "item")]
    >>> with EmbeddingBagCollection(configs, dram="32MiB", path=tempfile.mkdtemp()) as tables:
    ...     pooled = tables(torch.tensor([[1, 7], [1, 9]]))
    >>> list(pooled), pooled["item"].shape, bool((pooled.values()[:, 4:] == pooled["item"]).all())
    (['user', 'item'], torch.Size([2, 4]), True)
    """

    def __init__(self, names: Sequence[str], widths: Sequence[int], values: Tensor) -> None:
        ends = np.cumsum([0, *widths]).tolist()
        self._columns = {name: slice(*ends[at : at + 2]) for at, name in enumerate(names)}
        self._values = values

    def values(self) -> Tensor:  # type: ignore[override]
        """Return all features side by side, float32 [samples, sum of widths]."""
        return self._values

    def to_dict(self) -> dict[str, Tensor]:
        """Return the features by name."""
        return {name: self[name] for name in self}

    def __getitem__(self, name: str) -> Tensor:
        return self._values[:, self._columns[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


class EmbeddingBagCollection(TableModule):
    """Tables as large as the SSD, trained together through one DRAM budget.

    Parameters
    ----------
    tables
        :class:`EmbeddingBagConfig`, or TorchRec's.
    is_weighted
        As in TorchRec: True asks for weights of the ids in a batch, False leaves them out. None takes them where a
        batch has them.
    optimizer
        For all tables; or a dict with an optimizer for each, by name. Tables with different ones train a little slower
        than tables with one kind, whose numbers may differ. ``module.optimizer.param_groups`` has a group for each.
    dram, path, seed, resume, update, policy, codec, touched, step_rows, device
        As in :class:`EmbeddingBag`, for all tables together.

    Raises
    ------
    BudgetError, FileExistsError, FormatError
        As in :class:`EmbeddingBag`.
    ValueError
        For two tables or two features of one name; for a configuration of TorchRec's that asks for other rows than
        float32, or other first values than uniform ones.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from memhier.recsys import EmbeddingBagCollection, EmbeddingBagConfig
    >>> configs = [EmbeddingBagConfig(name=name, num_embeddings=100, embedding_dim=4) for name in ("user", "item")]
    >>> with EmbeddingBagCollection(configs, dram="32MiB", path=tempfile.mkdtemp()) as tables:
    ...     pooled = tables(torch.tensor([[1, 7], [1, 9], [2, 7]]))
    ...     pooled["item"].shape, pooled.values().shape
    (torch.Size([3, 4]), torch.Size([3, 8]))
    """

    def __init__(
        self,
        tables: Sequence[Any],
        *,
        is_weighted: bool | None = None,
        optimizer: Optimizers | None = None,
        dram: int | str,
        path: str | os.PathLike[str],
        seed: int = 0,
        resume: bool = False,
        update: Update = "backward",
        policy: str | Policy = "belady",
        codec: str = "none",
        touched: int | None = None,
        step_rows: int | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        parser = FeatureParser(tables, is_weighted=is_weighted)
        options = TableOptions(
            optimizer=optimizer, dram=dram, path=path, seed=seed, resume=resume, update=update,
            policy=policy, codec=codec, touched=touched, step_rows=step_rows, device=device,
        )  # fmt: skip
        super().__init__(look_ups_of(Tables(parser.specs, options, asked=ASKED), parser.ids_of))
        self._parser = parser

    @not_compiled
    def forward(self, features: Any) -> Any:
        """Return pooled rows of every feature, as :class:`Pooled`; as TorchRec's KeyedTensor for a batch of TorchRec's.

        Parameters
        ----------
        features
            A KeyedJaggedTensor; or a dict from each feature to ids [samples, length], or to ``(ids, offsets)`` or
            ``(ids, offsets, weights)`` as for :class:`EmbeddingBag`; or a tensor [samples, features] of one id each.

        Raises
        ------
        IndexError
            For a row that a table does not have.
        BudgetError
            When the distinct rows of this step do not fit; the message says how much would be enough.
        """
        bags = self._parser.bags_of(features)
        return self._parser.result(features, self._pooled(bags))

    def _weight_names(self) -> list[str]:
        # As TorchRec's.
        return [f"embedding_bags.{config.name}.weight" for config in self._parser.configs]

    def extra_repr(self) -> str:
        """Return the arguments that matter most."""
        return f"{len(self._parser.configs)} tables, {self.tables.bases[-1]} rows, path={self.tables.path!r}"


Part = tuple[Tensor, Tensor, Tensor | None]
"""Ids int64 [n], the beginnings of bags, and weights."""


class FeatureParser:
    """Turns features into the bags of each table.

    Parameters
    ----------
    pooled
        Whether tables say how their bags are pooled.
    is_weighted
        Whether weights of ids are asked for, True, or left out, False; None takes them where they are.

    Attributes
    ----------
    configs, specs
        The tables.
    features, widths
        Names of the features in the order of tables, and the width of each.

    Raises
    ------
    ValueError
        For two tables or two features of one name, and for more rows than there are keys.
    """

    def __init__(self, tables: Sequence[Any], *, pooled: bool = True, is_weighted: bool | None = None) -> None:
        if not tables:
            raise ValueError("tables: expected at least one")
        self._is_weighted = is_weighted if pooled else False
        self.configs: list[EmbeddingBagConfig] = [_as_config(table, pooled) for table in tables]
        self.features: list[str] = [name for config in self.configs for name in config.feature_names]
        for kind, given in (("table", [config.name for config in self.configs]), ("feature", self.features)):
            twice = sorted({name for name in given if given.count(name) > 1})
            if twice:
                raise ValueError(f"tables: more than one {kind} is named {twice[0]!r}")
        self.specs: list[TableSpec] = [
            TableSpec.of(config.name, config.num_embeddings, config.embedding_dim, config.initial, config.id_space)
            for config in self.configs
        ]
        self.widths: list[int] = [config.embedding_dim for config in self.configs for _ in config.feature_names]
        total = sum(spec.rows for spec in self.specs)
        if total > ROWS_MAX:
            raise ValueError(f"tables: {total} rows in all, expected at most {ROWS_MAX}")

    def check_ids(self, table: int, ids: Ints) -> None:
        """Raise IndexError for a row that a table does not have."""
        check_ids(self.specs[table], ids, ASKED.format(self.specs[table].name))

    def ids_of(self, features: Any) -> list[Ints]:
        """Return copies of the ids of each table, which stay when the batch is changed in place."""
        return [bag.indices.numpy().copy() for bag in self.bags_of(features)]

    def bags_of(self, features: Any) -> list[Bags]:
        """Return the bags of each table, with ids in place of indices."""
        parts = self._weighted(_parts(features, self.features))
        found, at = [], 0
        for number, config in enumerate(self.configs):
            mine = parts[at : at + len(config.feature_names)]
            at += len(mine)
            ids, offsets, weights = mine[0] if len(mine) == 1 else _joined(mine)
            bags = Bags(number, ids, offsets, MODES[config.pooling], weights, features=len(mine))
            bags.length = int(isinstance(features, Tensor))
            found.append(bags)
        return found

    def _weighted(self, parts: list[Part]) -> list[Part]:
        if self._is_weighted is None:
            return parts
        if not self._is_weighted:
            return [(ids, offsets, None) for ids, offsets, _ in parts]
        missing = [name for name, part in zip(self.features, parts, strict=True) if part[2] is None]
        if missing:
            raise ValueError(f"features: no weights of {missing[0]!r}, as is_weighted=True asks for")
        return parts

    def result(self, features: Any, values: Tensor) -> Any:
        """Return pooled rows as `Pooled`, or as TorchRec's KeyedTensor if the batch is TorchRec's."""
        make = keyed_tensor if is_of_torchrec(features) else Pooled
        return make(self.features, self.widths, values)

    def pooled(self, features: Any, pool: Callable[[Bags], Tensor]) -> Any:
        """Pool each table alone by a function, which returns float32 [bags, dim], feature after feature."""
        columns = [part for bags in self.bags_of(features) for part in pool(bags).chunk(bags.features)]
        return self.result(features, torch.cat(columns, dim=1))


def _parts(features: Any, names: Sequence[str]) -> list[Part]:
    """Return the bags of each feature."""
    if isinstance(features, Tensor):
        return _of_matrix(features, len(names))
    if isinstance(features, Mapping):
        found = []
        for name in names:
            if name not in features:
                raise ValueError(f"features: no {name!r}; there are {sorted(features)}")
            given = features[name]
            ids, offsets, weights = (*given, None, None)[:3] if isinstance(given, tuple) else (given, None, None)
            found.append(as_bags(ids, offsets, weights, "sum"))
    elif hasattr(features, "offsets") and hasattr(features, "keys"):
        found = _of_jagged(features, names)
    else:
        raise TypeError(
            f"features: expected a KeyedJaggedTensor, a dict, or a tensor [samples, {len(names)}], got "
            f"{type(features).__name__}"
        )
    samples = {len(part[1]) for part in found}
    if len(samples) > 1:
        raise ValueError(f"features: expected as many samples of each, got {sorted(samples)}")
    return found


def _of_matrix(ids: Tensor, count: int) -> list[Part]:
    if ids.dim() != 2 or ids.shape[1] != count or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"features: expected integers [samples, {count}], got {ids.dtype} {list(ids.shape)}")
    offsets = torch.arange(len(ids))
    return [(column, offsets, None) for column in ids.to("cpu", torch.int64).t().contiguous()]


def _of_jagged(features: Any, names: Sequence[str]) -> list[Part]:
    check_keyed_jagged(features)
    there = list(features.keys())
    missing = [name for name in names if name not in there]
    if missing:
        raise ValueError(f"features: no {missing[0]!r}; there are {there}")
    offsets, values, weights = features.offsets().cpu(), features.values().cpu(), features.weights_or_none()
    weights = None if weights is None else weights.cpu()
    samples = (len(offsets) - 1) // max(1, len(there))
    found = []
    for name in names:
        at = there.index(name) * samples
        begin, end = int(offsets[at]), int(offsets[at + samples])
        mine = None if weights is None else weights[begin:end]
        found.append(as_bags(values[begin:end], offsets[at : at + samples] - begin, mine, "sum"))
    return found


def _joined(parts: Sequence[Part]) -> Part:
    """Return the bags of several features of one table, feature after feature."""
    ends = np.cumsum([0, *(len(ids) for ids, _, _ in parts)]).tolist()
    offsets = torch.cat([begins + end for (_, begins, _), end in zip(parts, ends, strict=False)])
    weights = None
    if any(part[2] is not None for part in parts):
        weights = torch.cat([torch.ones(len(ids)) if given is None else given for ids, _, given in parts])
    return torch.cat([ids for ids, _, _ in parts]), offsets, weights


def _as_config(table: Any, pooled: bool) -> EmbeddingBagConfig:
    if pooled != hasattr(table, "pooling"):
        kind = "an EmbeddingBagConfig" if pooled else "an EmbeddingConfig, without pooling"
        raise TypeError(f"tables: expected {kind}, got {table!r}")
    pooling: Any = getattr(table.pooling, "value", table.pooling).lower() if pooled else "sum"
    if pooling not in ("sum", "mean"):
        raise ValueError(f"pooling={table.pooling!r}: expected 'sum' or 'mean'")
    rows = check_int("num_embeddings", table.num_embeddings, 1, ROWS_MAX)
    dim = check_int("embedding_dim", table.embedding_dim, 1, 2**20)
    initial = getattr(table, "initial", None) or initial_of_torchrec(table)
    if not table.name or not isinstance(table.name, str):
        raise ValueError(f"name={table.name!r}: expected text")
    return EmbeddingBagConfig(
        name=table.name, num_embeddings=rows, embedding_dim=dim,
        feature_names=tuple(table.feature_names) or (table.name,), pooling=pooling,
        initial=initial, id_space=getattr(table, "id_space", "rows"),
    )  # fmt: skip
