"""The calls of a sum tree in Python, with the results of the compiled core bit for bit."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["FAN", "draw_leaves", "level_starts", "set_leaves"]

FAN = 16
"""Children of a node."""

Ints = NDArray[np.int64]
Doubles = NDArray[np.float64]
Floats = NDArray[np.float32]


def level_starts(leaves: int) -> list[int]:
    """Return where the nodes of each level begin, the lowest first, and after them the number of all nodes."""
    starts, count = [0], leaves
    while count > 1:
        count = -(-count // FAN)
        starts.append(starts[-1] + -(-count // FAN) * FAN)
    return starts


def set_leaves(*, leaves: Floats, sums: Doubles, least: Floats, places: Ints, values: Floats) -> None:
    """Set leaves, and the nodes above them; raise ValueError for an unfit place or value, before anything changes."""
    if len(places) and not (places.min() >= 0 and places.max() < len(leaves)):
        raise ValueError("places: those of leaves")
    if len(values) and not (values.min() >= 0 and values.max() < np.inf):
        raise ValueError("values: finite, at least 0")
    leaves[places] = values
    starts, nodes = level_starts(len(leaves)), places
    for level, start in enumerate(starts[:-1]):
        nodes = np.unique(nodes // FAN)
        children = nodes[:, None] * FAN + np.arange(FAN)
        if level == 0:
            below = leaves[children]
            values_below, least_below = below.astype(np.float64), np.where(below > 0, below, np.float32(np.inf))
        else:
            values_below, least_below = sums[starts[level - 1] + children], least[starts[level - 1] + children]
        # Added up in order, as np.sum does not.
        sums[start + nodes] = np.cumsum(values_below, axis=1)[:, -1]
        least[start + nodes] = least_below.min(axis=1)


def draw_leaves(*, leaves: Floats, sums: Doubles, least: Floats, uniforms: Doubles, places: Ints, taking: bool) -> None:
    """Draw leaves; with `taking`, one after the other, each set to zero before the next draw."""
    if len(uniforms) and not (uniforms.min() >= 0 and uniforms.max() < 1):
        raise ValueError("uniforms: from 0 to below 1")
    if not taking:
        _draw(leaves, sums, uniforms, places)
        return
    for at in range(len(uniforms)):
        _draw(leaves, sums, uniforms[at : at + 1], places[at : at + 1])
        if places[at] >= 0:
            set_leaves(
                leaves=leaves, sums=sums, least=least, places=places[at : at + 1], values=np.zeros(1, np.float32)
            )


def _draw(leaves: Floats, sums: Doubles, uniforms: Doubles, places: Ints) -> None:
    starts = level_starts(len(leaves))
    total = sums[starts[-2]]
    if not total > 0:
        places[:] = -1
        return
    targets = uniforms * total
    nodes: Ints = np.zeros(len(uniforms), np.int64)
    for level in range(len(starts) - 2, -1, -1):
        children = nodes[:, None] * FAN + np.arange(FAN)
        values = sums[starts[level - 1] + children] if level else leaves[children].astype(np.float64)
        up_to = np.cumsum(values, axis=1)
        above = up_to > targets[:, None]
        chosen = np.where(above.any(axis=1), above.argmax(axis=1), FAN - 1 - (values > 0)[:, ::-1].argmax(axis=1))
        below = np.where(chosen > 0, up_to[np.arange(len(chosen)), chosen - 1], 0.0)
        targets = targets - below
        nodes = nodes * FAN + chosen
    places[:] = nodes
