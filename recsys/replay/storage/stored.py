"""What a buffer's last checkpoint holds, read while somebody trains with it."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from memhier.arrays import as_ints, check_range
from memhier.fields import described
from memhier.files import Files
from memhier.recsys.replay.batch import Batch
from memhier.recsys.replay.placement.members import Members
from memhier.recsys.replay.schema import Schema
from memhier.recsys.replay.state import settings_of
from memhier.recsys.replay.storage.storage import StorageTier
from memhier.shield import shielded
from memhier.store.store import Finding

__all__ = ["StoredSamples"]

Ints = NDArray[np.int64]


class StoredSamples:
    """The samples of a buffer's last checkpoint by position, 0 to len - 1; read only.

    Parameters
    ----------
    path
        The buffer's directory.

    Raises
    ------
    FormatError
        When there is something else.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> from memhier.recsys.replay import CarouselBuffer
    >>> place = pathlib.Path(tempfile.mkdtemp()) / "replay"
    >>> with CarouselBuffer(place, memory=2, schema={"x": "int64"}) as buffer:
    ...     _ = buffer.add({"x": np.arange(5)}, ids=[9, 8, 7, 6, 5])
    ...     _ = buffer.checkpoint()
    >>> with StoredSamples(place) as stored:
    ...     len(stored), stored.read([4, 0])["x"].tolist(), stored.ids.tolist()
    (5, [4, 0], [9, 8, 7, 6, 5])
    """

    def __init__(self, path: str | os.PathLike[str], *, files: Files | None = None) -> None:
        store, self.meta = StorageTier.open_store(path, writable=False, files=files)
        try:
            settings = settings_of(self.meta, Path(path), None)
            with described(f"{path}: the samples"):
                self._tier = StorageTier(store, settings.schema, settings.codecs, False)
        except BaseException:
            store.close()
            raise
        self._members = Members(self.meta["by_class"])
        try:
            self._tier.read_index(self._members, self.meta["size"], self.meta["same_class"] is False)
        except BaseException:
            self.close()
            raise

    @property
    def schema(self) -> Schema:
        """The fields of a sample."""
        return self._tier.schema

    @property
    def ids(self) -> Ints:
        """int64 [len]: ids, in place."""
        return self._members.ids

    @property
    def labels(self) -> Ints:
        """int64 [len]: labels; -1 where there are none."""
        return self._members.labels.astype(np.int64)

    @property
    def in_memory(self) -> Ints:
        """The positions that memory held, int64."""
        visible = self._tier.read_slots(self.meta)["visible"]
        return visible[visible >= 0].astype(np.int64)

    @property
    def storage_bytes(self) -> int:
        """Bytes on SSD."""
        return sum(int(log.stats()["log_bytes"]) for log in self._tier.logs)

    def __len__(self) -> int:
        return self._members.size

    def read(self, positions: Any) -> Batch:
        """Read samples; `slots` of the batch are their positions.

        Raises
        ------
        CorruptionError
            When one is damaged.
        """
        wanted = as_ints("positions", positions)
        check_range("positions", wanted, len(self), f"a position, 0 to {len(self) - 1}")
        batch = Batch.empty(self.schema, len(wanted))
        self._tier.read(wanted, batch.data)
        batch.labels[:], batch.ids[:], batch.slots[:] = self._members.labels[wanted], self.ids[wanted], wanted
        return batch

    def blocks(self, size: int = 1024) -> Iterator[Batch]:
        """Yield all samples in order."""
        for start in range(0, len(self), size):
            yield self.read(np.arange(start, min(start + size, len(self))))

    def check(self) -> list[Finding]:
        """Read everything and return every inconsistency."""
        return self._tier.store.check()

    @shielded
    def close(self) -> None:
        """Let go of everything."""
        self._tier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
