"""The type of a tier's rows, in the store's catalog: bytes alone do not tell floats from integers."""

import numpy as np

from memhier.cache.slab_memory import SlabLayout
from memhier.errors import FormatError
from memhier.store.store import Store

__all__ = ["RowSchema"]


class RowSchema:
    """Element type and shape of a row, and its codec, as the value ``tiered/<name>`` of the catalog.

    The value is text: a dict like the one of a .npy file. The first checkpoint writes it.
    """

    def __init__(self, store: Store, name: str, layout: SlabLayout, codec: str) -> None:
        self._store = store
        self.key: str = f"tiered/{name}"
        fields = {"dtype": np.lib.format.dtype_to_descr(layout.dtype), "shape": layout.shape, "codec": codec}
        self._value = repr(fields).encode()

    def check(self) -> None:
        """Raise FormatError when the store has rows of another type."""
        found = self._store.get(self.key)
        if found is None or found == self._value:
            return
        there = found[:200].decode(errors="backslashreplace")
        raise FormatError(f"{self._store.path}: {self.key!r} says {there}, expected {self._value.decode()}")

    def missing(self) -> dict[str, bytes]:
        """Return the value if the next checkpoint has to write it."""
        return {} if self._store.get(self.key) is not None else {self.key: self._value}
