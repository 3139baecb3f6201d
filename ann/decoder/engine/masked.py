"""The full product among allowed words."""

import numpy as np

from memhier.ann.decoder.allowed import Allowed, split_with
from memhier.ann.decoder.answers import TopK, best_of, joined
from memhier.ann.decoder.engine.engine import Engine
from memhier.ann.decoder.layer import Floats

__all__ = ["full_among"]

_STATES = 64  # whose logits are held at a time, a block of rows after the other


def full_among(engine: Engine, hidden: Floats, k: int, allowed: Allowed) -> TopK:
    """Compute the logits of all words, and select among those allowed; -1 with minus infinity where they are fewer."""
    return joined([_among(engine, part, k, words) for part, words in split_with(hidden, allowed, _STATES) if words])


def _among(engine: Engine, hidden: Floats, k: int, allowed: Allowed) -> TopK:
    mask = allowed.mask()
    best = TopK(np.full((len(hidden), k), -np.inf, np.float32), np.full((len(hidden), k), -1))
    for start, logits in engine.logit_blocks(hidden):
        among = np.where(mask[:, start : start + logits.shape[1]], logits, -np.inf)
        most = min(k, among.shape[1])
        rows = np.argpartition(-among, most - 1, axis=1)[:, :most]
        values = np.take_along_axis(among, rows, 1)
        rows = np.where(values > -np.inf, rows + start, -1)
        best = best_of(np.hstack([best.values, values]), np.hstack([best.indices, rows]), k)
    return best
