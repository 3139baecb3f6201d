"""EmbeddingCollection: sequences of ids looked up in many tables behind one plan, as in TorchRec."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memhier.policies import Policy
from memhier.recsys.embedding.collection import ASKED, FeatureParser
from memhier.recsys.embedding.ids.hash64 import IdSpace
from memhier.recsys.embedding.initial import Initial, Uniform
from memhier.recsys.embedding.jagged.sequences import Jagged, rows_of_sequences
from memhier.recsys.embedding.mapped_look_ups import look_ups_of
from memhier.recsys.embedding.module import TableModule
from memhier.recsys.embedding.pooling import Bags
from memhier.recsys.embedding.table_rules import Optimizers
from memhier.recsys.embedding.tables import TableOptions, Tables, Update
from memhier.recsys.embedding.torch_internals import not_compiled
from memhier.recsys.embedding.torchrec_types import is_of_torchrec, jagged_tensor

__all__ = ["EmbeddingCollection", "EmbeddingConfig", "lengths_of", "sequences_by_name"]


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """One table of sequences, with the fields of TorchRec's configuration.

    Attributes
    ----------
    name, num_embeddings, embedding_dim, feature_names, initial, id_space
        As of :class:`EmbeddingBagConfig`.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from memhier.recsys import EmbeddingCollection, EmbeddingConfig
    >>> items = EmbeddingConfig(name="item", num_embeddings=1000, embedding_dim=4, feature_names=["seen", "bought"])
    >>> with EmbeddingCollection([items], dram="32MiB", path=tempfile.mkdtemp()) as tables:
    ...     list(tables({"seen": torch.tensor([[1, 2, 3]]), "bought": torch.tensor([[2]])}))
    ['seen', 'bought']
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: Sequence[str] = ()
    initial: Initial = field(default_factory=Uniform)
    id_space: IdSpace = "rows"


class EmbeddingCollection(TableModule):
    """Tables as large as the SSD whose rows are returned as they are, trained together through one DRAM budget.

    Each table is trained with the bits of a ``torch.nn.Embedding(..., sparse=True)`` that looks up the ids of all its
    features at once, feature after feature. A feature without a gradient trains no row.

    Parameters
    ----------
    tables
        :class:`EmbeddingConfig`, or TorchRec's. Their widths may differ.
    optimizer, dram, path, seed, resume, update, policy, codec, touched, step_rows, device
        As in :class:`EmbeddingBagCollection`.

    Raises
    ------
    BudgetError, FileExistsError, FormatError
        As in :class:`EmbeddingBag`.
    ValueError
        For two tables or two features of one name, or a configuration that asks for other rows than float32.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from memhier.recsys import EmbeddingCollection, EmbeddingConfig
    >>> configs = [EmbeddingConfig(name=name, num_embeddings=100, embedding_dim=4) for name in ("item", "shop")]
    >>> with EmbeddingCollection(configs, dram="32MiB", path=tempfile.mkdtemp()) as tables:
    ...     found = tables({
    ...         "item": (torch.tensor([1, 2, 3]), torch.tensor([0, 1])),  # [1] and [2, 3]
    ...         "shop": torch.tensor([[7], [7]]),
    ...     })
    ...     found["item"].values().shape, found["item"].lengths().tolist(), found["shop"].to_padded_dense().shape
    (torch.Size([3, 4]), [1, 2], torch.Size([2, 1, 4]))
    """

    def __init__(
        self,
        tables: Sequence[Any],
        *,
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
        parser = FeatureParser(tables, pooled=False)
        options = TableOptions(
            optimizer=optimizer, dram=dram, path=path, seed=seed, resume=resume, update=update,
            policy=policy, codec=codec, touched=touched, step_rows=step_rows, device=device,
        )  # fmt: skip
        super().__init__(look_ups_of(Tables(parser.specs, options, asked=ASKED), parser.ids_of))
        self._parser = parser

    @not_compiled
    def forward(self, features: Any) -> dict[str, Any]:
        """Return the rows of every feature.

        Parameters
        ----------
        features
            As of :class:`EmbeddingBagCollection`, whose bags are the sequences here. Weights are left out.

        Returns
        -------
        dict
            For each feature a :class:`Jagged`; a JaggedTensor of TorchRec, if `features` is TorchRec's.

        Raises
        ------
        IndexError
            For a row that a table does not have.
        BudgetError
            When the distinct rows of this step do not fit; the message says how much would be enough.
        """
        bags = self._parser.bags_of(features)
        lengths = lengths_of(bags)
        counts = [bag.lengths.view(bag.features, -1).sum(1).tolist() for bag in bags]
        ids, trains = [bag.indices.numpy() for bag in bags], self._trains
        look_up = self.look_ups.begin(trains)
        rows = self.look_ups.rows_of(ids, trains, self._admits)
        if look_up is not None:
            look_up.rows = rows
        done = partial(self.look_ups.take, look_up, rows) if trains else None
        crossing = self._crossing()
        values = rows_of_sequences(self.tables, rows, counts, self._anchor, done, crossing)
        if crossing is not None:
            lengths = crossing.sent(lengths)
        if not trains:
            rows.release()
        return sequences_by_name(features, self._parser.features, values, lengths)

    def _weight_names(self) -> list[str]:
        # As TorchRec's.
        return [f"embeddings.{config.name}.weight" for config in self._parser.configs]

    def extra_repr(self) -> str:
        """Return the arguments that matter most."""
        return f"{len(self._parser.configs)} tables, {self.tables.bases[-1]} rows, path={self.tables.path!r}"


def lengths_of(bags: list[Bags]) -> list[Tensor]:
    """Return the lengths of the sequences of every feature."""
    return [each for bag in bags for each in bag.lengths.view(bag.features, -1)]


def sequences_by_name(
    features: Any, names: Sequence[str], values: Sequence[Tensor], lengths: Sequence[Tensor]
) -> dict[str, Any]:
    """Return the rows of every feature as `Jagged`, or as TorchRec's JaggedTensor if the batch is TorchRec's."""
    make = jagged_tensor if is_of_torchrec(features) else Jagged
    return {name: make(*each) for name, *each in zip(names, values, lengths, strict=True)}
