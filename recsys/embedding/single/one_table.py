"""The base of the modules of one table: arguments that they share, checked."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, int32, int64

from memhier.arguments import check_int
from memhier.recsys.embedding.ids.hash64 import IdSpace, as_id_space
from memhier.recsys.embedding.initial import Initial, Normal, TableSpec
from memhier.recsys.embedding.mapped_look_ups import look_ups_of
from memhier.recsys.embedding.module import TableModule
from memhier.recsys.embedding.tables import Ints, TableOptions, Tables

__all__ = ["ROWS_MAX", "OneTable", "check_ids_tensor"]

ROWS_MAX = 2**62


class OneTable(TableModule):
    """A module of one table; `ids_of` returns the ids in its arguments, the others are those of a module."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None,
        initial: Initial | None,
        id_space: IdSpace,
        options: TableOptions,
        ids_of: Callable[..., list[Ints]],
    ) -> None:
        num_embeddings = check_int("num_embeddings", num_embeddings, 1, ROWS_MAX)
        embedding_dim = check_int("embedding_dim", embedding_dim, 1, 2**20)
        if padding_idx is not None and as_id_space(id_space) is not None:
            padding_idx = check_int("padding_idx", padding_idx, -(2**63), 2**63 - 1)
        elif padding_idx is not None:
            padding_idx = check_int("padding_idx", padding_idx, -num_embeddings, num_embeddings - 1) % num_embeddings
        initial = Normal() if initial is None else initial
        spec = TableSpec.of("weight", num_embeddings, embedding_dim, initial, id_space, padding_idx)
        super().__init__(look_ups_of(Tables([spec], options), ids_of))
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx

    @property
    def _padding_row(self) -> int:
        """The row of the padding; -1 for none."""
        spec = self.specs[0]
        if self.padding_idx is None:
            return -1
        return self.padding_idx if spec.id_space is None else spec.padding_row

    def _weight_names(self) -> list[str]:
        return ["weight"]


def check_ids_tensor(input: Any) -> None:
    """Raise TypeError or ValueError for anything but a tensor of integers."""
    if not isinstance(input, Tensor) or input.dtype not in (int32, int64):
        found = input.dtype if isinstance(input, Tensor) else type(input)
        raise TypeError(f"input: expected a tensor of int32 or int64, got {found}")
    if input.device.type == "meta":
        raise ValueError("input: expected a tensor with values, got one on meta")
