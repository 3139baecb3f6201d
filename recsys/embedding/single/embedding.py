"""Embedding: one table whose rows are returned as they are, with the arguments and results of `torch.nn.Embedding`."""

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memhier.policies import Policy
from memhier.recsys.embedding.ids.hash64 import IdSpace
from memhier.recsys.embedding.initial import Initial
from memhier.recsys.embedding.optimizers import SparseOptimizer
from memhier.recsys.embedding.pooling import ROWS, Bags
from memhier.recsys.embedding.single.one_table import OneTable, check_ids_tensor
from memhier.recsys.embedding.tables import Ints, TableOptions, Update
from memhier.recsys.embedding.torch_internals import not_compiled

__all__ = ["Embedding"]


class Embedding(OneTable):
    """`torch.nn.Embedding` on a table as large as the SSD, trained through a DRAM budget.

    For sequence models and for anything else that takes rows one by one. Outputs, gradients and trained rows have the
    bits of ``torch.nn.Embedding(..., sparse=True)`` with torch's optimizer of the same name, at any budget.

    Parameters
    ----------
    num_embeddings, embedding_dim
        As in torch.
    padding_idx
        A row without a gradient, as in torch: zeros at first, and returned as it is.
    optimizer, dram, path, seed, initial, id_space, resume, update, policy, codec, touched, step_rows, device
        As of :class:`EmbeddingBag`; so are the errors.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from memhier.recsys import Embedding
    >>> with Embedding(10**9, 4, padding_idx=0, dram="32MiB", path=tempfile.mkdtemp()) as items:
    ...     histories = torch.tensor([[7, 8, 0], [9, 0, 0]])
    ...     output = items(histories)
    ...     output.sum().backward()
    >>> output.shape
    torch.Size([2, 3, 4])
    >>> output[1, 2].tolist()
    [0.0, 0.0, 0.0, 0.0]
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        optimizer: SparseOptimizer | None = None,
        dram: int | str,
        path: str | os.PathLike[str],
        seed: int = 0,
        initial: Initial | None = None,
        id_space: IdSpace = "rows",
        resume: bool = False,
        update: Update = "backward",
        policy: str | Policy = "belady",
        codec: str = "none",
        touched: int | None = None,
        step_rows: int | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        options = TableOptions(
            optimizer=optimizer, dram=dram, path=path, seed=seed, resume=resume, update=update,
            policy=policy, codec=codec, touched=touched, step_rows=step_rows, device=device,
        )  # fmt: skip
        super().__init__(num_embeddings, embedding_dim, padding_idx, initial, id_space, options, _ids_of)
        if self.padding_idx is not None and not resume and self.specs[0].id_space is None:
            try:
                self.tables.write(0, np.array([self.padding_idx]), np.zeros((1, embedding_dim), np.float32))
            except BaseException:
                self.close()
                raise

    @not_compiled
    def forward(self, input: Tensor) -> Tensor:
        """Return a row for each id, float32 ``[*input.shape, embedding_dim]``.

        Parameters
        ----------
        input
            int32 or int64, of any shape.

        Raises
        ------
        IndexError
            For a row that the table does not have.
        BudgetError
            When the distinct rows of this step do not fit; the message says how much would be enough.
        """
        ids = _flat(input)
        bags = Bags(0, ids, torch.arange(len(ids)), ROWS, padding=self._padding_row, length=1)
        return self._pooled([bags]).view(*input.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        """Return the arguments that matter most."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, path={self.tables.path!r}"


def _flat(input: Tensor) -> Tensor:
    check_ids_tensor(input)
    return input.detach().reshape(-1).to("cpu", torch.int64).contiguous()


def _ids_of(input: Any) -> list[Ints]:
    # A copy: a batch that is changed in place afterwards has other ids than these.
    return [_flat(input).numpy().copy()]
