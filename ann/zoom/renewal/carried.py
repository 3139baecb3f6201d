"""What goes with the rows of parts that are written anew: their attributes, and the strings that are their ids."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.filters.attributes import Schema, chain, write_attributes
from memhier.ann.zoom.ids.ids import Located, texts_at
from memhier.ann.zoom.ids.stored_texts import in_order, write_texts
from memhier.ann.zoom.ids.texts import Texts
from memhier.ann.zoom.preview.code_scan import PART_SHIFT
from memhier.ann.zoom.renewal.fresh import Fresh
from memhier.ann.zoom.storage.part import Part
from memhier.store.store import Staging, Transaction

__all__ = ["write_carried"]


def write_carried(
    tx: Transaction | Staging, name: str, parts: Sequence[Part], schema: Schema, rows: npt.NDArray[Any], block_rows: int
) -> None:
    """Write the attributes and strings of rows into the segments of the part `name`.

    Parameters
    ----------
    tx
        Takes them.
    name
        Of the part that they become.
    parts
        Whose rows they were.
    schema
        Types of the attributes.
    rows
        Integers ``[n]``: the number of each row when those of all `parts` are counted.
    block_rows
        How many rows of attributes are on their way at a time.
    """
    if schema:
        attributes = [part.attributes for part in parts if part.attributes is not None]
        write_attributes(tx, f"{name}-a-", schema, chain(attributes, schema), rows, block_rows)
    if any(part.texts is not None for part in parts):
        offsets, none = np.cumsum([0, *map(len, parts)]), Fresh.empty(1, np.dtype(np.float32), texts=True)

        def take(some: npt.NDArray[Any]) -> Texts:
            part = np.searchsorted(offsets, some, side="right") - 1
            positions = part << PART_SHIFT | (some.astype(np.int64) - offsets[part])
            return texts_at(parts, none, Located(positions, np.full(len(some), -1)))

        write_texts(tx, f"{name}-texts", in_order(take, rows))
