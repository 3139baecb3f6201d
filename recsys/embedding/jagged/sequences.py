"""Rows of sequences: each id's row as it is, feature by feature, with gradients for the features that have some."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memhier.recsys.embedding.device.crossing import Crossing
from memhier.recsys.embedding.pooling import EVALUATED, ComingRows, Sparse, check_first_pass
from memhier.recsys.embedding.tables import StepRows, Tables
from memhier.recsys.embedding.torch_internals import sparse_rows

__all__ = ["Jagged", "rows_of_sequences"]

Done = Callable[[ComingRows | Sparse], None]


class Jagged:
    """Sequences of rows, one after the other, like TorchRec's JaggedTensor.

    Parameters
    ----------
    values
        float32 [ids, dim]: the rows of the first sequence, then those of the next.
    lengths
        int64 [samples].

    Examples
    --------
    >>> import torch
    >>> from memhier.recsys import Jagged
    >>> sequences = Jagged(torch.ones(3, 2), torch.tensor([1, 2]))
    >>> sequences.offsets().tolist(), sequences.to_padded_dense()[0].tolist()
    ([0, 1, 3], [[1.0, 1.0], [0.0, 0.0]])
    """

    def __init__(self, values: Tensor, lengths: Tensor) -> None:
        self._values, self._lengths = values, lengths

    def values(self) -> Tensor:
        """Return the rows of all sequences, float32 [ids, dim]."""
        return self._values

    def lengths(self) -> Tensor:
        """Return the length of each sequence, int64 [samples]."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Return the beginning of each sequence, and the end of the last, int64 [samples + 1]."""
        return nn.functional.pad(self._lengths.cumsum(0), (1, 0))

    def to_dense(self) -> list[Tensor]:
        """Return the rows of each sequence, float32 [length, dim]."""
        return [*torch.split(self._values, self._lengths.tolist())]

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """Return sequences of one length, float32 [samples, length, dim].

        Parameters
        ----------
        desired_length
            Longer sequences are cut off behind it; by default the longest.
        padding_value
            Takes the places behind shorter sequences.
        """
        longest = int(self._lengths.max()) if len(self._lengths) else 0
        length = longest if desired_length is None else desired_length
        places = torch.arange(length, device=self._lengths.device)
        inside = places < self._lengths[:, None]
        rows = (self.offsets()[:-1, None] + places)[inside]
        padded = self._values.new_full((len(self._lengths), length, self._values.shape[1]), padding_value)
        return padded.index_put((inside,), self._values[rows])


def rows_of_sequences(
    tables: Tables,
    rows: StepRows,
    counts: Sequence[Sequence[int]],
    anchor: Tensor,
    done: Done | None,
    crossing: Crossing | None,
) -> tuple[Tensor, ...]:
    """Return the rows of each feature's ids, float32 [ids, dim]; on the way back the gradient goes to `done`.

    Parameters
    ----------
    counts
        The number of ids of each feature, table by table.
    anchor, done, crossing
        As of `pooling.pool`.
    """
    found: tuple[Tensor, ...] = _Sequences.apply(anchor, tables, rows, counts, done, crossing)  # type: ignore[no-untyped-call]
    return found if crossing is None else crossing.over(*found)


class _Sequences(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        tables: Tables,
        rows: StepRows,
        counts: Sequence[Sequence[int]],
        done: Done | None,
        crossing: Crossing | None,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a feature without a gradient trains no row
        ctx.done, ctx.crossing, ctx.is_read = done, crossing, done is None
        found: list[Tensor] = []
        places: list[tuple[Tensor, ...]] = []
        for table, weights in enumerate(tables.weights(rows)):
            mine = torch.from_numpy(rows.places(table))
            places.append(torch.split(mine, list(counts[table])))
            found += [torch.from_numpy(weights)[some] for some in places[table]]
        ctx.places, ctx.sizes = places, [rows.of_table(table) for table in range(len(counts))]
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        places, ctx.places = ctx.places, None
        done, ctx.done = ctx.done, None
        if ctx.needs_input_grad[0] and ctx.is_read:
            raise RuntimeError(EVALUATED)
        for gradient in gradients:
            if gradient is not None:
                check_first_pass(places, gradient)
        if done is not None:
            make = partial(_of_rows, places, ctx.sizes, gradients)
            arrival = None if ctx.crossing is None else ctx.crossing.arrival
            done(make() if arrival is None else ComingRows(arrival, make))
        return None, None, None, None, None, None


def _of_rows(places: list[tuple[Tensor, ...]], sizes: Sequence[slice], gradients: Sequence[Tensor | None]) -> Sparse:
    of_rows: Sparse = []
    left = iter(gradients)
    for table, (of_features, size) in enumerate(zip(places, sizes, strict=True)):
        there = [(some, gradient) for some, gradient in zip(of_features, left, strict=False) if gradient is not None]
        if there:
            values = torch.cat([gradient for _, gradient in there])
            shape = (size.stop - size.start, values.shape[1])
            of_rows.append((table, sparse_rows(torch.cat([some for some, _ in there]), values, shape)))
    return of_rows
