"""The samples of a buffer's last checkpoint, read while a training run uses the buffer."""

import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import as_ints, check_range
from memhier.closing import Closing
from memhier.fields import described
from memhier.files import Files
from memhier.recsys.replay.batch import Batch
from memhier.recsys.replay.codecs.encoding import Encoding
from memhier.recsys.replay.placement.placement import Members
from memhier.recsys.replay.schema import Schema
from memhier.recsys.replay.settings import stored_schema
from memhier.recsys.replay.storage.storage import Storage
from memhier.shield import shielded
from memhier.store.store import CACHE_BYTES, Finding

__all__ = ["StoredSamples"]

Ints = NDArray[np.int64]


class StoredSamples(Closing):
    """The samples of a buffer's last checkpoint by position, 0 to len - 1; read only.

    It is a map-style data set, whose items are dicts of the values of one sample; torch's ``DataLoader`` reads those of
    a batch at once. A fork may read on. It can be pickled to other processes, which open the same checkpoint.

    Parameters
    ----------
    path
        The buffer's directory, or the URL of a backup.
    files
        File layer; the operating system's by default.
    cache, cache_bytes
        For the pages of a backup; see :meth:`memhier.Store.open`.

    A damaged catalog is read as far as it is whole, with a warning that names the damage.

    Raises
    ------
    FormatError
        If `path` holds something else.
    RuntimeError
        From unpickling, if the buffer has a newer checkpoint by then.

    Examples
    --------
    >>> import pathlib
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.recsys.replay import CarouselBuffer, StoredSamples
    >>> place = pathlib.Path(tempfile.mkdtemp()) / "replay"
    >>> with CarouselBuffer(place, memory=2, schema={"x": "int64"}) as buffer:
    ...     _ = buffer.add({"x": np.arange(5)}, ids=[9, 8, 7, 6, 5])
    ...     _ = buffer.checkpoint()
    >>> with StoredSamples(place) as stored:
    ...     len(stored), stored.read([4, 0])["x"].tolist(), stored.ids.tolist(), int(stored[-1]["ids"])
    (5, [4, 0], [9, 8, 7, 6, 5], 5)
    """

    def __init__(
        self, path: str | os.PathLike[str], *, files: Files | None = None, cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | str = CACHE_BYTES,
    ) -> None:  # fmt: skip
        self.meta: Any
        self._source = (path, files, cache, cache_bytes)
        store, self.meta = Storage.open_store(
            path, writable=False, files=files, cache=cache, cache_bytes=cache_bytes, salvage=True
        )
        try:
            schema = stored_schema(store, self.meta, None)
            with described(f"{path}: the samples"):
                self._encoding = Encoding(schema)
                self._storage = Storage(store, self._encoding.held, self.meta["codecs"], False)
        except BaseException:
            store.close()
            raise
        self._members = Members(False)
        try:
            self._members.restore(self._storage.read_positions(self.meta), False)
        except BaseException:
            self.close()
            raise

    @property
    def schema(self) -> Schema:
        """The fields of a sample."""
        return self._encoding.schema

    @property
    def ids(self) -> Ints:
        """int64 [len]: ids, in place."""
        return self._members.ids

    @property
    def labels(self) -> Ints:
        """int64 [len]: labels; -1 for none."""
        return self._members.labels.astype(np.int64)

    @property
    def in_memory(self) -> Ints:
        """The positions that memory held, int64."""
        visible = self._storage.read_slots(self.meta)["visible"]
        return visible[visible >= 0].astype(np.int64)

    @property
    def storage_bytes(self) -> int:
        """Bytes on SSD."""
        return sum(int(log.stats()["log_bytes"]) for log in self._storage.logs)

    def __len__(self) -> int:
        return self._members.size

    def read(self, positions: Any) -> Batch:
        """Read samples; `slots` of the batch are their positions.

        Parameters
        ----------
        positions
            Integers [n], 0 to len - 1; may repeat.

        Raises
        ------
        CorruptionError
            If one is damaged.
        """
        wanted = as_ints("positions", positions)
        check_range("positions", wanted, len(self), f"a position, 0 to {len(self) - 1}")
        batch = Batch.empty(self.schema, len(wanted))
        with described(f"{self._storage.path}: a sample"):
            self._encoding.fill(batch.data, lambda held: self._storage.read(wanted, held))
        batch.labels[:], batch.ids[:], batch.slots[:] = self._members.labels[wanted], self.ids[wanted], wanted
        return batch

    def __getitem__(self, position: int) -> dict[str, Any]:
        """Return one sample: its values by column, ``labels`` and ``ids``. Negative positions count from the end."""
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[dict[str, Any]]:
        """Return several samples, read at once.

        Raises
        ------
        IndexError
            For a position that there is not.
        """
        wanted = as_ints("positions", np.array(positions, dtype=None if len(positions) else np.int64))
        unfit = (wanted < -len(self)) | (wanted >= len(self))
        if unfit.any():
            raise IndexError(f"position {int(wanted[unfit][0])}: there are {len(self)} samples")
        return self.read(np.where(wanted < 0, wanted + len(self), wanted)).samples()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield all samples in order, read in blocks."""
        for batch in self.blocks():
            yield from batch.samples()

    def __getstate__(self) -> tuple[Any, int]:
        return self._source, self._storage.store.generation

    def __setstate__(self, state: tuple[Any, int]) -> None:
        (path, files, cache, cache_bytes), generation = state
        self.__init__(path, files=files, cache=cache, cache_bytes=cache_bytes)  # type: ignore[misc]
        if self._storage.store.generation != generation:
            self.close()
            raise RuntimeError(
                f"{path}: has a newer checkpoint than the data set that was sent here; begin the workers before the "
                "next checkpoint, or give them a copy"
            )

    def blocks(self, size: int = 1024, *, whole: bool = False) -> Iterator[Batch]:
        """Yield all samples in order, in batches of `size`; the last one may have fewer.

        Parameters
        ----------
        size
            Most samples of a batch.
        whole
            Whether damaged samples are left out, with one warning at the end that names their ids; else one raises.
        """
        damaged: list[int] = []
        for start in range(0, len(self), size):
            wanted = np.arange(start, min(start + size, len(self)))
            if not whole:
                yield self.read(wanted)
                continue
            columns, there = self._storage.read_whole(wanted, self._encoding)
            damaged += self.ids[wanted[~there]].tolist()
            yield Batch(columns, self.labels[wanted[there]], self.ids[wanted[there]], wanted[there])
        if damaged:
            warnings.warn(f"{self._storage.path}: the samples of ids {damaged} are damaged and were left out",
                          RuntimeWarning, stacklevel=2)  # fmt: skip

    def check(self) -> list[Finding]:
        """Read everything and return every inconsistency."""
        return self._storage.store.check()

    @shielded
    def close(self) -> None:
        """Close the store."""
        self._storage.close()
