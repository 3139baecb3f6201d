"""Weighted admission: samples of large loss, or any other weight, are kept more often."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.recsys.replay.placement.admit import Reservoir
from memhier.recsys.replay.placement.placement import Decisions, Placement
from memhier.recsys.replay.schema import Columns, Schema

__all__ = ["Weighted"]

Ints = NDArray[np.int64]

_LEAST, _MOST = 1e-30, 1e30
_A_LITTLE_MORE = float(np.float32(_MOST))  # as a field of float32 has it


class Weighted(Reservoir):
    """Storage is a sample of the stream by weights, memory a uniform sample of storage.

    Storage keeps the samples that draws one after the other without replacement would give, each with a probability in
    proportion to its weight among those not drawn yet (algorithm A-Res of Efraimidis and Spirakis, Information
    Processing Letters 2006). `forget` and a smaller storage leave such a sample of the rest. A sample of weight 0 stays
    only while there is room.

    Parameters
    ----------
    by
        A field of one float or integer: the weight of a sample as it comes, such as its loss or the model's
        uncertainty; 0, or 1e-30 to 1e30. Later values of a mutable field change nothing.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.recsys.replay import CarouselBuffer, Weighted
    >>> path = tempfile.mkdtemp() + "/buffer"
    >>> schema = {"x": "int64", "loss": "float32"}
    >>> with CarouselBuffer(path, memory=2, storage=50, schema=schema, admit=Weighted("loss")) as buffer:
    ...     x = np.arange(1000)
    ...     _ = buffer.add({"x": x, "loss": np.where(x < 10, 1000, 1).astype("float32")})
    ...     int((buffer.stored_ids() < 10).sum())
    10
    """

    name = "weighted"
    beside: str | None = "key"

    def __init__(self, by: str) -> None:
        self.by = by

    def check_schema(self, schema: Schema) -> None:
        """See :class:`Admission`."""
        field = schema.fields.get(self.by)
        if field is None or np.dtype(field.dtype).kind not in "fiu" or field.shape != ():
            raise ValueError(f"admit=Weighted({self.by!r}): expected a field of one number for each sample; the fields "
                             f"are {schema}")  # fmt: skip

    def values(self, labels: Ints, columns: Columns) -> NDArray[Any]:
        """See :class:`Admission`."""
        weights = columns[self.by].astype(np.float64)
        unfit = ~((weights == 0) | ((weights >= _LEAST) & (weights <= _A_LITTLE_MORE)))
        if unfit.any():
            raise ValueError(f"batch[{self.by!r}]: expected weights of 0, or of {_LEAST} to {_MOST}, got "
                             f"{weights[unfit][0]}")  # fmt: skip
        return weights

    def encoded(self) -> dict[str, Any]:
        """See :class:`Admission`."""
        return {"by": self.by, "beside": self.beside}

    def admit(self, placement: Placement, labels: Ints, ids: Ints, values: NDArray[Any]) -> Decisions:
        """See :class:`Admission`."""
        decisions = Decisions(len(labels))
        keys = placement.members.keys
        assert keys is not None
        uniforms = placement.draws(len(labels))
        placement.count_labels(labels)
        # The times of exponential clocks of these rates: storage keeps the first ones.
        with np.errstate(divide="ignore", invalid="ignore"):
            times = np.where(values == 0, np.inf, -np.log1p(-uniforms[:, 0]) / values).astype(np.float32)
        appended = placement.room_for(len(labels))
        if appended:
            self._append(placement, decisions, uniforms[:appended], labels[:appended], ids[:appended])
            keys.put(decisions.positions[:appended], times[:appended])
        for sample, time in enumerate(times[appended:].tolist(), appended):
            latest, position = keys.largest(placement.size)
            if time < latest:
                keys.replace_largest(time)
                some = np.array([sample])
                placement.replace(decisions, some, np.array([position]), labels[some], ids[some])
        return decisions
