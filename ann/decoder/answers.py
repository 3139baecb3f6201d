"""The answers of a decoder, and the choice of the largest logits."""

from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.layer import Floats, Ints

__all__ = ["LogProb", "Partition", "TopK", "best_of", "joined", "largest_of", "split"]

Doubles: TypeAlias = npt.NDArray[np.float64]


# Tuples, as they are made several times faster than objects that nothing can change, in each call.
class TopK(NamedTuple):
    """The largest logits of each hidden state.

    Attributes
    ----------
    values, indices
        float32 and int64 ``[n, k]``, largest first: exact logits of the words found.
    proven
        bool ``[n]``: True for states whose k words are the largest of the whole layer beyond doubt, rounding included.
        None without a certificate.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.ann import LogitIndex
    >>> weight = np.random.default_rng(0).normal(size=(500, 16)).astype("float32")
    >>> top = LogitIndex.build(weight).topk(weight[[3, 5]], k=2, certify=True)
    >>> top.indices[:, 0].tolist(), top.values.shape, top.proven.tolist()
    ([3, 5], (2, 2), [True, True])
    """

    values: Floats
    indices: Ints
    proven: npt.NDArray[np.bool_] | None = None


class Partition(NamedTuple):
    """log Z, the logarithm of the sum of exp of all logits.

    Attributes
    ----------
    estimate
        float64 ``[n]``.
    low, high
        float64 ``[n]``: proven bounds, for any context.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.ann import LogitIndex
    >>> weight = np.random.default_rng(0).normal(size=(500, 16)).astype("float32")
    >>> log_z = LogitIndex.build(weight).partition(weight[[3]])
    >>> exact = np.log(np.exp(weight @ weight[3]).sum())
    >>> bool(log_z.low[0] <= exact <= log_z.high[0]), bool(abs(log_z.estimate[0] - exact) < 0.01)
    (True, True)
    """

    estimate: Doubles
    low: Doubles
    high: Doubles


class LogProb(NamedTuple):
    """Log-probabilities of given words.

    Attributes
    ----------
    estimate
        float64 ``[n]``.
    low, high
        float64 ``[n]``: proven bounds.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.ann import LogitIndex
    >>> weight = np.random.default_rng(0).normal(size=(500, 16)).astype("float32")
    >>> score = LogitIndex.build(weight).log_prob(weight[[3, 3]], targets=[3, 4])
    >>> bool(score.estimate[0] > score.estimate[1]), bool((score.low <= score.high).all())
    (True, True)
    """

    estimate: Doubles
    low: Doubles
    high: Doubles


Answer = TypeVar("Answer", TopK, Partition)


def joined(answers: list[Answer]) -> Answer:
    """Return the answers for the parts of a batch as one answer for the batch."""
    if len(answers) == 1:
        return answers[0]
    fields: Any = (None if parts[0] is None else np.concatenate(parts) for parts in zip(*answers, strict=True))
    return type(answers[0])(*fields)


def split(hidden: Floats, step: int) -> list[Floats]:
    """Return a batch in parts of at most so many states."""
    return [hidden[start : start + step] for start in range(0, max(1, len(hidden)), step)]


def largest_of(logits: Floats, k: int) -> TopK:
    """Return the k largest of all logits ``[n, V]``."""
    words = logits.shape[1]
    if k == words:
        return best_of(logits, np.broadcast_to(np.arange(words), logits.shape), k)
    rows = np.argpartition(-logits, k, axis=1)[:, :k]
    return best_of(np.take_along_axis(logits, rows, 1), rows, k)


def best_of(logits: Floats, rows: Ints, k: int) -> TopK:
    """Return the k largest, and of equal logits the smaller row first."""
    order = np.lexsort((rows, -logits), axis=1)[:, :k]
    return TopK(np.take_along_axis(logits, order, 1), np.take_along_axis(rows, order, 1))
