"""The vectors that an update of fields alone keeps."""

from typing import Any

import numpy.typing as npt

from memhier.ann.zoom.storage.ids import Located
from memhier.ann.zoom.storage.snapshot import IndexSnapshot
from memhier.io.reader import Reader

__all__ = ["KeptVectors"]


class KeptVectors:
    """The vectors of ids as they are stored, read a run at a time: a matrix ``[n, d]`` to take slices of.

    Parameters
    ----------
    state
        The index before the update; its files stay as long as this object.
    places
        Of the vectors.
    reader
        Of the index.
    """

    def __init__(self, state: IndexSnapshot, places: Located, reader: Reader) -> None:
        self._state, self._places, self._reader = state, places, reader

    def __len__(self) -> int:
        return len(self._places.positions)

    def __getitem__(self, rows: slice) -> npt.NDArray[Any]:
        places = Located(self._places.positions[rows], self._places.fresh[rows])
        return self._state.vectors_in(places, self._reader)
