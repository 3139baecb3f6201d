"""A build: from a layer and contexts to codes, graph and measured settings."""

import warnings
from dataclasses import dataclass, replace

import numpy as np

from memhier.ann.decoder.calibration.calibrate import (
    INSIDE,
    HeldOut,
    calibrate_coarse,
    calibrate_digits,
    calibrate_far,
    calibrate_preview,
    calibrate_proof,
    calibrate_screen,
    calibrate_walk,
    hold_out,
    scan_cost,
    spare_preview,
)
from memhier.ann.decoder.calibration.familiar import ranges_of
from memhier.ann.decoder.calibration.settings import WAYS, Method, Settings
from memhier.ann.decoder.coding.codes import RowCodes, encode, encode_rows, hash_rows
from memhier.ann.decoder.coding.digits import DIGITS, DigitCodes
from memhier.ann.decoder.coding.graph import build_links, giants, learn_seeds, relink
from memhier.ann.decoder.coding.projection import Projection, fit_projection
from memhier.ann.decoder.coding.view import Codes
from memhier.ann.decoder.engine.dram_engine import DramEngine
from memhier.ann.decoder.engine.engine import Effort, Walk
from memhier.ann.decoder.layer import Floats, OutputLayer, as_floats

__all__ = ["CONTEXTS_LEAST", "BuildOptions", "build_codes", "encode_again", "row_norms", "warn_if_short"]

CONTEXTS_LEAST = 64
SEEDS_PER_K = 2  # times k largest rows of a context become seeds of its group
_FIRST_WIDTH = 64
_GRAPH_LEAST = 256  # words: below, a scan is as fast as any walk
_SAFE = 0.9998  # the least precision of the preview, even if the other ways may have less
_SAFE_DIGITS = 0.998  # the same by digits: one context of 512 may miss its largest logit
_DIGITS_LEAST = 32 << 20  # bytes of a scan; fewer lie in a cache, or cost little
_DIGIT_SHARES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  # digits for a direction, in the mean
_LIMIT_MOST = 64  # candidates; rather than more of them, codes grow


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """The options of :meth:`LogitIndex.build` that codes and settings depend on, checked."""

    k: int = 10
    precision: float = 0.99
    method: Method = "auto"
    rank: int | None = None
    seed: int = 0
    progress: bool = False


def build_codes(
    layer: OutputLayer, contexts: Floats | None, options: BuildOptions
) -> tuple[Codes, Settings, HeldOut | None]:
    """Return codes and settings, and the contexts held out to measure them.

    Raises
    ------
    ValueError
        If there are too few contexts, or they are not finite, or the method needs some and there are none.
    """
    method = options.method
    if contexts is None:
        if method in ("graph", "screen"):
            raise ValueError(
                f"contexts=None: method={method!r} learns from real hidden states; give some, or 'preview'"
            )
        return *_without_contexts(layer, options), None
    if len(contexts) < CONTEXTS_LEAST:
        raise ValueError(f"contexts has {len(contexts)} rows: expected at least {CONTEXTS_LEAST}")
    if not np.isfinite(contexts).all():
        row = int(np.flatnonzero(~np.isfinite(contexts).all(1))[0])
        raise ValueError(f"contexts[{row}] holds NaN or infinity: expected finite numbers")
    learned, held_out = hold_out(contexts, options.seed)
    held = HeldOut.of(layer, held_out, options.k)
    projection = fit_projection(layer, learned)
    codes, settings = _preview_codes(layer, projection, held, options)
    codes, settings = _add_digits(layer, codes, held, settings)
    settings = calibrate_proof(DramEngine(codes, layer), held, settings)
    settings = settings.with_(ranges=ranges_of(projection, contexts))
    if method in ("auto", "graph", "screen") and layer.shape[0] >= _GRAPH_LEAST:
        codes, settings = _add_graph(layer, codes, settings, learned, held, options)
    return codes, settings, held


def _preview_codes(
    layer: OutputLayer, projection: Projection, held: HeldOut, options: BuildOptions
) -> tuple[Codes, Settings]:
    """Return codes of the given rank, or of the smallest width that is precise with few candidates."""
    norms, hashes = row_norms(layer), hash_rows(layer)
    settings, rank = Settings(k=held.k, precision=options.precision), options.rank
    most, wanted = len(projection.turn), max(settings.asked, _SAFE)
    width = min(most, _FIRST_WIDTH) if rank is None else -(-rank // 4) * 4
    while True:
        codes = Codes(projection, encode(layer, projection, width), None, None, norms, hashes)
        engine = DramEngine(codes, layer)
        settings = calibrate_preview(engine, held, settings, wanted)
        enough = settings.reached["preview"] >= wanted and settings.preview_limit <= max(_LIMIT_MOST, 2 * held.k)
        if rank is not None or width == most or enough:
            return codes, spare_preview(engine, held, settings)
        width = min(most, 2 * width)


def _add_digits(layer: OutputLayer, codes: Codes, held: HeldOut, settings: Settings) -> tuple[Codes, Settings]:
    """Return codes with digits, if a preview of them is precise and costs less than one of the block codes."""
    if scan_cost(codes, settings) < _DIGITS_LEAST:
        return codes, settings
    best, least = (codes, settings), scan_cost(codes, settings)
    rows = RowCodes.of(codes.blocks, layer.shape[0])
    for share in _DIGIT_SHARES:
        digits = DigitCodes.of(codes.blocks, max(1, int(share * codes.blocks.width) // DIGITS) * DIGITS)
        trial = replace(codes, rows=rows, digits=digits)
        found = calibrate_digits(DramEngine(trial, layer), held, settings, max(settings.asked, _SAFE_DIGITS))
        cost = scan_cost(trial, found) if found.digit_survivors else least
        if cost < least:
            best, least = (trial, found), cost
    return best


def _add_graph(
    layer: OutputLayer, codes: Codes, settings: Settings, learned: Floats, held: HeldOut, options: BuildOptions
) -> tuple[Codes, Settings]:
    """Return codes with a graph, and settings with the effort of walks and of seeds alone for the precision."""
    rows = codes.rows or RowCodes.of(codes.blocks, layer.shape[0])
    engine = DramEngine(replace(codes, rows=rows), layer)
    settings = calibrate_coarse(engine, held, settings, max(settings.asked, _SAFE))
    most = min(layer.shape[0], SEEDS_PER_K * held.k)
    limit = settings.scaled(settings.preview_limit, most)
    largest = engine.preview(learned, most, limit, settings.coarse(most)).indices
    always = giants(codes.blocks, layer.shape[0])
    links, coordinates = build_links(rows, options.progress), codes.projection(learned)[:, : codes.blocks.width]
    codes = replace(codes, rows=rows, graph=learn_seeds(links, coordinates, largest, always, options.seed))
    engine = DramEngine(codes, layer)
    away = np.empty(len(learned), np.float32)
    engine.walk(learned, 1, Walk(Effort(1, 0, 1)), away=away)
    settings = settings.with_(radius=float(np.quantile(away, INSIDE)))
    settings = calibrate_walk(engine, held, settings, settings.asked)
    settings = calibrate_far(engine, held, settings, options.seed)
    return codes, calibrate_screen(engine, held, settings, settings.asked)


def encode_again(codes: Codes, layer: OutputLayer) -> tuple[Codes, int]:
    """Return codes of a changed layer in the same coordinates, and the count of changed rows; only these are coded."""
    hashes = hash_rows(layer)
    changed = np.flatnonzero(hashes != codes.hashes)
    if not len(changed):
        return codes, 0
    blocks, norms = encode_rows(layer, codes.projection, codes.blocks, changed), codes.norms.copy()
    norms[changed] = _norms_of(as_floats(layer.weight[changed], layer.dtype))
    digits = None if codes.digits is None else codes.digits.again(blocks, changed)
    rows = None if codes.rows is None else RowCodes.of(blocks, layer.shape[0])
    again = Codes(codes.projection, blocks, rows, None, norms, hashes, digits)
    if codes.graph is not None and rows is not None:
        again = replace(again, graph=replace(codes.graph, links=relink(codes.graph.links, rows, changed)))
    return again, len(changed)


def row_norms(layer: OutputLayer) -> Floats:
    """Return upper bounds of the norms of a layer's rows."""
    return np.concatenate([_norms_of(block) for _, block in layer.blocks()])


def _norms_of(rows: Floats) -> Floats:
    return np.asarray(np.linalg.norm(rows.astype(np.float64), axis=1) * (1 + 1e-6), np.float32)


def _without_contexts(layer: OutputLayer, options: BuildOptions) -> tuple[Codes, Settings]:
    projection = fit_projection(layer, None)
    width = len(projection.turn) if options.rank is None else -(-options.rank // 4) * 4
    blocks = encode(layer, projection, width)
    codes = Codes(projection, blocks, None, None, row_norms(layer), hash_rows(layer))
    return codes, Settings(k=options.k, precision=options.precision, preview_limit=max(64, 4 * options.k))


def warn_if_short(settings: Settings, method: Method) -> None:
    """Warn if the measured precision is below the declared one."""
    wanted = settings.precision
    ways = WAYS if method == "auto" else (method,)
    short = max((settings.reached[way] for way in ways if way in settings.reached), default=1.0)
    if short < wanted:
        way = "no way but the full product reaches" if method == "auto" else f"method={method!r} does not reach"
        warnings.warn(
            f"{way} precision={wanted} on the contexts held out, but {short:.4f}: "
            "a larger rank may, more contexts may, and method='full' does",
            stacklevel=3,
        )
