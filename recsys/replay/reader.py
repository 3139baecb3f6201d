"""Memory seen from other processes: the workers of a data loader."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import as_ints, check_range
from memhier.cache.slab import Slab
from memhier.recsys.replay.batch import Batch, room
from memhier.recsys.replay.codecs.encoding import Encoding
from memhier.recsys.replay.placement.memory import Memory
from memhier.recsys.replay.schema import Schema

__all__ = ["MemoryReader"]


class MemoryReader:
    """Reads slots of a buffer's memory, in its own process or in others of the same machine.

    It can be pickled, and used after a fork. Every sample read is whole, as of some moment, whatever the buffer does
    meanwhile. Made by `CarouselBuffer.reader`; `resize` gives the buffer new memory, which old readers do not see.

    Parameters
    ----------
    schema
        The fields of a sample.
    slab
        The buffer's memory.

    Examples
    --------
    >>> import pickle
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.recsys import CarouselBuffer
    >>> with CarouselBuffer(tempfile.mkdtemp() + "/buffer", memory=4, schema={"x": "int64"}) as buffer:
    ...     _ = buffer.add({"x": np.arange(10)})
    ...     sent = pickle.dumps((buffer.reader(), buffer.sample(2).slots))
    ...     reader, slots = pickle.loads(sent)  # in another process
    ...     batch = reader.read(slots)
    >>> bool((batch["x"] == batch.ids).all())
    True
    """

    def __init__(self, schema: Schema, slab: Slab) -> None:
        self.schema = schema
        self._slab = slab
        self._encoding = Encoding(schema)
        self._memory = Memory(self._encoding.held, slab)

    def __len__(self) -> int:
        """Slots, whether or not they hold a sample."""
        return self._slab.slots

    def read(self, slots: Any, out: Batch | Mapping[str, Any] | None = None) -> Batch:
        """Copy samples out.

        Parameters
        ----------
        slots
            Integers [n]: of batches drawn by the buffer. A slot that holds nothing reads as the last sample that it
            held, at first as zeros.
        out
            To fill instead of allocating, of at least n samples; see `CarouselBuffer.sample`.

        Raises
        ------
        CorruptionError
            If the process that owns memory died while it wrote one of the slots.
        """
        wanted = as_ints("slots", slots)
        if wanted.ndim != 1:
            raise ValueError(f"slots: expected shape [n], got {list(wanted.shape)}")
        check_range("slots", wanted, len(self), f"a slot, 0 to {len(self) - 1}")
        batch = room(self.schema, out, len(wanted))
        self._encoding.fill_batch(batch, lambda held: self._memory.read_shared(wanted, held))
        batch.slots[:] = wanted
        return batch

    def labels(self) -> NDArray[np.int64]:
        """Return the labels of all slots, int64, a copy."""
        return self._memory.labels.copy()

    def ids(self) -> NDArray[np.int64]:
        """Return the ids of all slots, int64, a copy."""
        return self._memory.ids.copy()

    def __getstate__(self) -> tuple[Schema, Slab]:
        return self.schema, self._slab

    def __setstate__(self, state: tuple[Schema, Slab]) -> None:
        self.__init__(*state)  # type: ignore[misc]
