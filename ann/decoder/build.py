"""A build: from a layer and contexts to codes, graph and measured settings."""

import numpy as np

from memhier.ann.decoder.calibrate import HeldOut, calibrate_preview, split
from memhier.ann.decoder.codes import encode
from memhier.ann.decoder.engine import Codes, Engine
from memhier.ann.decoder.layer import Floats, OutputLayer
from memhier.ann.decoder.projection import fit_projection
from memhier.ann.decoder.settings import Method, Settings

__all__ = ["CONTEXTS_LEAST", "build_codes", "encode_again", "row_norms"]

CONTEXTS_LEAST = 64
_FIRST_WIDTH = 64
_SAFE = 0.999  # what the preview is to reach, however little is asked of the other ways
_LIMIT_MOST = 64  # candidates; rather than more of them, codes grow


def build_codes(
    layer: OutputLayer,
    contexts: Floats | None,
    k: int,
    precision: float,
    method: Method,
    rank: int | None,
    seed: int,
    progress: bool,
) -> tuple[Codes, Settings, HeldOut | None]:
    """Return codes and settings, and the contexts that were held out to measure them.

    Raises
    ------
    ValueError
        When there are too few contexts, or they are not finite, or the method needs some and there are none.
    """
    if contexts is None:
        if method in ("graph", "screen"):
            raise ValueError(
                f"contexts=None: method={method!r} learns from real hidden states; give some, or 'preview'"
            )
        return _without_contexts(layer, k, precision, rank)
    if len(contexts) < CONTEXTS_LEAST:
        raise ValueError(f"contexts has {len(contexts)} rows: expected at least {CONTEXTS_LEAST}")
    if not np.isfinite(contexts).all():
        row = int(np.flatnonzero(~np.isfinite(contexts).all(1))[0])
        raise ValueError(f"contexts[{row}] holds NaN or infinity: expected finite numbers")
    learned, held_out = split(contexts, seed)
    held = HeldOut.of(layer, held_out, k)
    projection = fit_projection(layer, learned)
    norms = row_norms(layer)
    settings = Settings(k=k, precision=precision)
    most = len(projection.turn)
    width = min(most, _FIRST_WIDTH) if rank is None else -(-rank // 4) * 4
    while True:
        blocks, _ = encode(layer, projection, width, None)
        codes = Codes(projection, blocks, None, None, norms)
        settings = calibrate_preview(Engine(codes, layer), held, settings, max(precision, _SAFE))
        enough = settings.reached["preview"] >= max(precision, _SAFE) and settings.preview_limit <= max(
            _LIMIT_MOST, 2 * k
        )
        if rank is not None or width == most or enough:
            return codes, settings, held
        width = min(most, 2 * width)


def encode_again(codes: Codes, layer: OutputLayer) -> tuple[Codes, int]:
    """Return codes of a layer in the coordinates of another, and how many rows differ."""
    blocks, rows = encode(layer, codes.projection, codes.blocks.width, None if codes.rows is None else codes.rows.width)
    words = layer.shape[0]
    differs = (blocks.by_row() != codes.blocks.by_row()).any(1) | (blocks.numbers != codes.blocks.numbers).any(0)
    return Codes(codes.projection, blocks, rows, codes.graph, row_norms(layer)), int(differs[:words].sum())


def row_norms(layer: OutputLayer) -> Floats:
    """Return upper bounds of the norms of a layer's rows."""
    norms = [np.linalg.norm(block.astype(np.float64), axis=1) for _, block in layer.blocks()]
    return (np.concatenate(norms) * (1 + 1e-6)).astype(np.float32)


def _without_contexts(layer: OutputLayer, k: int, precision: float, rank: int | None) -> tuple[Codes, Settings, None]:
    projection = fit_projection(layer, None)
    width = len(projection.turn) if rank is None else -(-rank // 4) * 4
    blocks, _ = encode(layer, projection, width, None)
    codes = Codes(projection, blocks, None, None, row_norms(layer))
    return codes, Settings(k=k, precision=precision, preview_limit=max(64, 4 * k)), None
