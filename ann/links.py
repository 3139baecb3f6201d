"""The links of graphs by the MRNG rule, of lists and of the decoder's rows."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier import backend

__all__ = ["NO_ROW", "links_as_rows", "prune_in_python", "prune_links", "with_reverse"]

NO_ROW = 0xFFFFFFFF
_REVERSE = 32  # candidates among the rows that link to a row
_BLOCK = 1024

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint32]


def prune_links(rows: Floats, numbers: Ints, candidates: Ints, degree: int, *, inner: bool = False) -> Words:
    """Return links by the MRNG rule: a neighbour stays unless one that stayed is nearer to it than the row is.

    Parameters
    ----------
    rows
        float32 ``[V, width]``.
    numbers
        int64 ``[n]``: of the rows whose links are wanted.
    candidates
        int64 ``[n, c]``: rows near each, -1 for none.
    inner
        Whether all rows have one norm, so that the larger product is the nearer; else their distance counts.

    Returns
    -------
    numpy.ndarray
        uint32 ``[n, degree]``. Places that the rule leaves go to the nearest of the others, then to :data:`NO_ROW`.

    Notes
    -----
    The rule is that of the monotonic relative neighbourhood graph of Fu et al. (VLDB 2019). It takes up to ``c degree``
    comparisons a row.
    """
    links = np.empty((len(numbers), degree), np.uint32)
    prune = prune_in_python if backend.core is None else backend.core.prune_links
    prune(rows=rows, numbers=numbers, candidates=candidates, inner=inner, links=links)
    return links


def prune_in_python(*, rows: Floats, numbers: Ints, candidates: Ints, inner: bool, links: Words) -> None:
    """Fill `links`, as the compiled core does; see :func:`prune_links`."""
    links[:] = NO_ROW
    for place, (own, near) in enumerate(zip(numbers, candidates, strict=True)):
        others = np.unique(near[(near >= 0) & (near != own)])
        to_own = _nearness(rows[others], rows[own][None], inner)[:, 0]
        order = np.lexsort((others, -to_own))
        others, to_own = others[order], to_own[order]
        between = _nearness(rows[others], rows[others], inner)
        kept: list[int] = []
        for i in range(len(others)):
            if len(kept) < links.shape[1] and bool((between[i, kept] <= to_own[i]).all()):
                kept.append(i)
        kept += [i for i in range(len(others)) if i not in set(kept)][: links.shape[1] - len(kept)]
        links[place, : len(kept)] = others[kept]


def _nearness(some: Floats, others: Floats, inner: bool) -> Floats:
    """Return how near rows are to others, ``[n, m]``: the larger the nearer."""
    near: Floats = some @ others.T if inner else -np.square(some[:, None] - others).sum(axis=2)
    return near


def with_reverse(links: Words, rows: Floats, numbers: Ints, *, inner: bool = False) -> Words:
    """Return the links of rows, chosen again among their links and the rows that link to them."""
    back, degree = _reverse(links), links.shape[1]
    again = np.empty((len(numbers), degree), np.uint32)
    for start in range(0, len(numbers), _BLOCK):
        some = numbers[start : start + _BLOCK]
        both = np.concatenate([links_as_rows(links[some]), back[some]], 1)
        again[start : start + _BLOCK] = prune_links(rows, some, both, degree, inner=inner)
    return again


def links_as_rows(links: Words) -> Ints:
    """Return links as int64, -1 for none."""
    return np.where(links == NO_ROW, -1, links.astype(np.int64))


def _reverse(links: Words) -> npt.NDArray[np.int32]:
    """Return the rows that link to each row, int32 ``[V, 32]``, -1 for none."""
    words, degree = links.shape
    targets = links.reshape(-1)
    sources = np.repeat(np.arange(words, dtype=np.int32), degree)[targets != NO_ROW]
    targets = targets[targets != NO_ROW]
    order = np.argsort(targets, kind="stable")
    targets, sources = targets[order], sources[order]
    starts = np.searchsorted(targets, np.arange(words, dtype=np.uint32))
    back = np.full((words, _REVERSE), -1, np.int32)
    place = np.arange(len(targets)) - starts[targets]
    fits = place < _REVERSE
    back[targets[fits], place[fits]] = sources[fits]
    return back
