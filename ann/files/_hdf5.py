"""Vectors in HDF5, in the layout of ann-benchmarks: data sets ``train``, ``test``, ``neighbors`` and ``distances``."""

from importlib import import_module
from typing import Any

from memhier.ann.files._sliced import SlicedVectors
from memhier.io.outside import reading
from memhier.lazy import extra_for

__all__ = ["Hdf5Vectors"]


class Hdf5Vectors(SlicedVectors):
    """One data set of an HDF5 file.

    Raises
    ------
    ImportError
        When h5py is not installed.
    ValueError
        When the file has no data set `key`; the message names its data sets.
    FormatError
        When the file is not HDF5, or the data set is no matrix of numbers.
    """

    def __init__(self, path: str, key: str) -> None:
        # The message of h5py for a missing file hides the error's number in a long line.
        with open(path, "rb"):
            pass
        with extra_for(f"{path}: HDF5"):
            h5py = import_module("h5py")
        with reading(path):
            self._file = h5py.File(path, "r")
        try:
            found = _find(h5py, self._file, path, key)
            with reading(path, f"data set {key!r}"):
                super().__init__(_Guarded(found, f"{path}[{key!r}]"), f"{path}[{key!r}]")
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file. May be called twice."""
        super().close()
        self._file.close()


class _Guarded:
    """A data set whose read errors name the file and the rows."""

    def __init__(self, data: Any, name: str) -> None:
        self.shape, self.dtype, self.chunks = data.shape, data.dtype, data.chunks
        self._data, self._name = data, name

    def __getitem__(self, rows: slice) -> Any:
        with reading(self._name, f"rows {rows.start:,} to {rows.stop - 1:,}"):
            return self._data[rows]


def _find(h5py: Any, file: Any, path: str, key: str) -> Any:
    names: list[str] = []
    with reading(path):
        found = file.get(key)
        if not isinstance(found, h5py.Dataset):
            file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    if not isinstance(found, h5py.Dataset):
        raise ValueError(f"key={key!r}: {path} has no such data set, expected one of {', '.join(names) or 'none'}")
    return found
