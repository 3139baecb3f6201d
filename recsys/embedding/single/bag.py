"""EmbeddingBag: one table, with the arguments and results of `torch.nn.EmbeddingBag`."""

import os
from typing import Any, Literal

import torch
from torch import Tensor

from memhier.policies import Policy
from memhier.recsys.embedding.ids.hash64 import IdSpace
from memhier.recsys.embedding.initial import Initial
from memhier.recsys.embedding.optimizers import SparseOptimizer
from memhier.recsys.embedding.pooling import MODES, Bags
from memhier.recsys.embedding.single.one_table import OneTable, check_ids_tensor
from memhier.recsys.embedding.tables import Ints, TableOptions, Update
from memhier.recsys.embedding.torch_internals import not_compiled

__all__ = ["EmbeddingBag", "Mode", "as_bags"]

Mode = Literal["sum", "mean", "max"]


class EmbeddingBag(OneTable):
    """`torch.nn.EmbeddingBag` on a table as large as the SSD, trained through a DRAM budget.

    Outputs, gradients and trained rows have the bits of ``torch.nn.EmbeddingBag(..., sparse=True)`` with torch's
    optimizer of the same name, at any budget (Bagpipe, arXiv 2202.12429, promises the same of synchronous
    training). The table never exists as a parameter: a row takes room once it was touched.

    Parameters
    ----------
    num_embeddings, embedding_dim, mode, padding_idx, include_last_offset
        As in torch.
    optimizer
        Updates the rows; its hyperparameters can be changed later in ``module.optimizer.param_groups[0]``.
    dram
        Bytes for everything, such as ``"2GB"``.
    path
        A folder on SSD for this module alone.
    seed, initial
        The first values depend only on these and on the row; :meth:`initial_weights` returns them.
    id_space
        ``"rows"``: ids are rows, 0 to ``num_embeddings - 1``. ``"hash64"``: ids are any int64, such as
        :func:`memhier.recsys.hash64` makes of words. Each gets one of `num_embeddings` rows of its own as it comes in
        training, so 10**9 is as cheap as few; :class:`memhier.recsys.Hash64` has options for that. Ids without a row
        share one more, which is zeros at first. Evaluation gives no rows.
    resume
        Go on from the checkpoint in `path`, with its hyperparameters. A table for any ids may get more rows by that.
    update
        ``"backward"``: the backward pass applies gradients, and ``zero_grad()`` does not take that back. ``"step"``:
        ``module.optimizer.step()`` does. Scaled losses, as of `torch.amp.GradScaler`, and backward passes that are not
        a step, such as probes of gradients, micro-batches and batches that are skipped, need ``"step"``: see Notes.
    policy, codec
        The rule that keeps rows in DRAM, and the encoding of rows on SSD; see :class:`memhier.table.tiered.Tiered`. A
        codec that rounds needs an optimizer without state, SGD without momentum: beside large weights small state would
        become zero. ``"int8ef"`` keeps the errors of its integers as well, so a row that leaves keeps the change of one
        step (down to the largest weight / 64000), and rows with a NaN or infinity unchanged. ``"int8"`` is refused.
    touched
        Most distinct rows that will ever be trained, for which the index of rows on SSD gets room: 53 bytes of `dram`
        each, or 8 for each row that there is. By default all, where that is half of `dram` at most; otherwise as many
        as a quarter of `dram` has room for, and half as many again as were trained at each resume, until the index
        takes half of `dram`. The index takes memory as rows come in use.
    step_rows
        Most distinct rows of one step, for which working memory is set aside; by default the budget decides.
    device
        Where outputs lie, the CPU or a CUDA device; :meth:`to` moves them. The rows stay in DRAM and on SSD.

    Raises
    ------
    BudgetError
        When `dram` is too small; the message says how much would be enough.
    FileExistsError
        When `path` holds a checkpoint and `resume` is False.
    FileNotFoundError
        When `resume` is True and `path` holds no checkpoint.
    FormatError
        When the checkpoint belongs to another table.
    LockedError
        When another process or module has `path` open.
    ValueError, TypeError
        For an unfit argument.

    Notes
    -----
    Gradients of `per_sample_weights` have torch's bits where rows take a multiple of 16 bytes. For other rows, torch's
    own last bits depend on the place of a row in memory on some processors.

    With ``update="backward"`` the rows have been trained when the backward pass ends, so `torch.amp.GradScaler.scale`
    refuses a loss that comes from them. It does not notice other scalers, losses scaled by hand, and look-ups inside of
    ``torch.utils.checkpoint`` with ``use_reentrant=True``. With ``update="step"`` call ``scale_gradients(1 /
    scaler.get_scale())`` before ``module.optimizer.step()``. A backward pass whose gradients are zeroed before a step
    has trained the rows as well. The next step of `module.optimizer`, or of an optimizer of all parameters of the
    model, warns of it, and raises if such passes come before each step. If no such optimizer makes a step, there is no
    warning. A step without gradients of rows does not count, as in torch after ``zero_grad()``.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from memhier.recsys import EmbeddingBag
    >>> with EmbeddingBag(10**9, 4, dram="32MiB", path=tempfile.mkdtemp()) as bag:
    ...     before = bag.weights([7])
    ...     bag(torch.tensor([[7, 7]])).sum().backward()
    ...     bool(torch.allclose(bag.weights([7]), before - 0.01))
    True
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: Mode = "mean",
        optimizer: SparseOptimizer | None = None,
        dram: int | str,
        path: str | os.PathLike[str],
        seed: int = 0,
        initial: Initial | None = None,
        id_space: IdSpace = "rows",
        padding_idx: int | None = None,
        include_last_offset: bool = False,
        resume: bool = False,
        update: Update = "backward",
        policy: str | Policy = "belady",
        codec: str = "none",
        touched: int | None = None,
        step_rows: int | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: expected one of {', '.join(map(repr, MODES))}")
        options = TableOptions(
            optimizer=optimizer, dram=dram, path=path, seed=seed, resume=resume, update=update,
            policy=policy, codec=codec, touched=touched, step_rows=step_rows, device=device,
        )  # fmt: skip
        super().__init__(num_embeddings, embedding_dim, padding_idx, initial, id_space, options, _ids_of)
        self.mode = mode
        self.include_last_offset = include_last_offset

    @not_compiled
    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Return pooled rows, float32 [bags, embedding_dim]; arguments as in torch.

        Raises
        ------
        IndexError
            For a row that the table does not have.
        BudgetError
            When the distinct rows of this step do not fit; the message says how much would be enough.
        """
        flat, offsets, weights = as_bags(input, offsets, per_sample_weights, self.mode)
        if self.include_last_offset and (not len(offsets) or int(offsets[-1]) != len(flat)):
            raise ValueError(f"offsets: expected {len(flat)} as the last one, as include_last_offset is set")
        length = input.shape[1] if input.dim() == 2 else 0
        bags = Bags(
            0, flat, offsets, MODES[self.mode], weights, self._padding_row, self.include_last_offset, length=length
        )
        return self._pooled([bags])

    def extra_repr(self) -> str:
        """Return the arguments that matter most."""
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}, path={self.tables.path!r}"


def _ids_of(input: Any, offsets: Any = None, *others: Any) -> list[Ints]:
    if offsets is None and isinstance(input, Tensor) and input.dim() == 1:
        offsets = torch.zeros(1, dtype=torch.int64)  # the ids of a batch do not depend on its bags
    # A copy: a batch that is changed in place afterwards has other ids than these.
    return [as_bags(input, offsets, None, "sum")[0].numpy().copy()]


def as_bags(
    input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None, mode: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return flat ids, offsets and weights of arguments that `torch.nn.EmbeddingBag` takes.

    Raises
    ------
    TypeError, ValueError
        For arguments that torch refuses as well.
    """
    check_ids_tensor(input)
    if per_sample_weights is not None:
        if mode != "sum":
            raise ValueError(f"per_sample_weights: expected only with mode='sum', this is mode={mode!r}")
        if per_sample_weights.dtype != torch.float32:
            raise TypeError(f"per_sample_weights: expected float32, as the rows are, got {per_sample_weights.dtype}")
        if per_sample_weights.shape != input.shape:
            raise ValueError(
                f"per_sample_weights: expected shape {list(input.shape)}, got {list(per_sample_weights.shape)}"
            )
        per_sample_weights = per_sample_weights.cpu().reshape(-1).contiguous()
    if input.dim() == 2:
        if offsets is not None:
            raise ValueError("offsets: expected None with a 2-D input, each of whose rows is a bag")
        width = input.shape[1]
        offsets = torch.arange(0, input.numel(), width) if width else torch.zeros(input.shape[0], dtype=torch.int64)
    elif input.dim() != 1:
        raise ValueError(f"input: expected 1 or 2 dimensions, got {input.dim()}")
    elif offsets is None:
        raise ValueError("offsets: expected a tensor with a 1-D input")
    elif offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"offsets: expected int64 [bags], got {offsets.dtype} {list(offsets.shape)}")
    else:
        offsets = offsets.to("cpu", torch.int64).contiguous()
        _check_offsets(offsets, input.numel())
    return input.detach().reshape(-1).to("cpu", torch.int64).contiguous(), offsets, per_sample_weights


def _check_offsets(offsets: Tensor, count: int) -> None:
    if not len(offsets):
        if count:
            raise ValueError(f"offsets: expected the beginnings of bags, got none for the {count} ids of input")
        return
    if int(offsets[0]) != 0:
        raise ValueError(f"offsets[0]={int(offsets[0])}: expected 0, the beginning of the first bag")
    if bool((offsets[1:] < offsets[:-1]).any()) or int(offsets[-1]) > count:
        raise ValueError(f"offsets: expected rising numbers up to the {count} ids of input")
