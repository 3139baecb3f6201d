"""The description of a stored decoder in the catalog, and checks of its settings and arrays against each other."""

from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.calibration.settings import METHODS, WAYS, Settings
from memhier.ann.decoder.coding.codes import CHUNK_ROWS
from memhier.ann.decoder.coding.digits import DIGITS
from memhier.errors import CorruptionError, FormatError
from memhier.fields import Check, decode_json, integer, mapping, one_of, real, record, row, sequence, text

__all__ = ["VERSION", "check_settings", "check_shapes", "decode_about"]

VERSION = 5
_READ = (3, 4, VERSION)
_COUNT = integer(0, 2**31)

_SETTINGS: dict[str, Check] = {
    "k": integer(1, 2**31), "precision": real(0, 1), "preview_limit": _COUNT, "coarse_width": _COUNT,
    "survivors": _COUNT, "graph_ef": _COUNT, "graph_limit": _COUNT, "probes": _COUNT, "screen_probes": _COUNT,
    "screen_limit": _COUNT, "radius": real(0), "far_ef": _COUNT, "far_limit": _COUNT, "far_radius": real(0),
    "proof_rows": _COUNT, "digit_survivors": _COUNT, "digit_limit": _COUNT, "unproven": real(0, 1),
    "reached": mapping(real(0, 1)), "choices": sequence(row(integer(1), one_of(*WAYS)), 1),
}  # fmt: skip

# Dtype, and lengths: numbers, or names, each for one length in all arrays.
_ARRAYS: dict[str, tuple[str, tuple[int | str, ...]]] = {
    "bias": ("float32", ("rows",)),
    "codes/norms": ("float32", ("rows",)),
    "codes/hashes": ("uint64", ("rows",)),
    "projection/mean": ("float32", ("dimension",)),
    "projection/turn": ("float32", ("turned", "dimension")),
    "projection/common": ("float32", ("dimension",)),
    "blocks/codes": ("uint8", ("blocks", "quads", CHUNK_ROWS, 4)),
    "blocks/numbers": ("float32", (5, "padded")),
    "rows/codes": ("uint8", ("rows", "width")),
    "rows/numbers": ("float32", (2, "rows")),
    "digits/codes": ("uint8", ("blocks", "sixteens", CHUNK_ROWS, 4)),
    "digits/directions": ("uint32", ("digits",)),
    "digits/values": ("float32", ("digits",)),
    "graph/links": ("uint32", ("rows", "degree")),
    "graph/centres": ("float32", ("groups", "seen")),
    "graph/halves": ("float32", ("groups",)),
    "graph/starts": ("int64", ("bounds",)),
    "graph/seeds": ("uint32", ("seeds",)),
}
_ALWAYS = [name for name in _ARRAYS if not name.startswith(("rows/", "digits/", "graph/"))]
_SHAPE = row(text(), sequence(integer(0, 2**40), 1, 4))

_CHECK = record({
    "version": integer(),
    "dtype": one_of("float32", "float16", "bfloat16"),
    "method": one_of(*METHODS),
    "digest": text(),
    "settings": record({}, _SETTINGS),
    "arrays": record(dict.fromkeys(_ALWAYS, _SHAPE), dict.fromkeys(_ARRAYS, _SHAPE)),
})  # fmt: skip


def decode_about(raw: bytes, path: object) -> dict[str, Any]:
    """Return the description of a decoder.

    Raises
    ------
    FormatError, CorruptionError
        If the value is no description, or of another version.
    """
    where = f"{path}: the value 'decoder'"
    version = decode_json(raw, where, record({"version": integer()}))["version"]
    if version not in _READ:
        raise FormatError(f"{path}: decoder format {version}, this memhier reads 3 to {VERSION}; build it again")
    about: dict[str, Any] = decode_json(raw, where, _CHECK)
    return about


def check_shapes(described: dict[str, tuple[str, list[int]]], path: object) -> dict[str, int]:
    """Return the common lengths of the arrays by name; raise CorruptionError for an array that does not fit."""
    if unknown := described.keys() - _ARRAYS.keys():
        raise CorruptionError(f"{path}: a decoder has no arrays {sorted(unknown)}")
    sizes: dict[str, int] = {}
    for name, (dtype, shape) in described.items():
        expected = _ARRAYS[name]
        if dtype != expected[0] or len(shape) != len(expected[1]):
            raise CorruptionError(f"{path}: array {name!r} is said to be {dtype}{shape}, expected {expected}")
        for length, wanted in zip(shape, expected[1], strict=True):
            if (sizes.setdefault(wanted, length) if isinstance(wanted, str) else wanted) != length:
                raise CorruptionError(f"{path}: array {name!r} is said to be {dtype}{shape}, which the others are not")
    blocks = -(-sizes["rows"] // CHUNK_ROWS)
    if (sizes["blocks"], sizes["padded"], sizes["turned"]) != (
        blocks, blocks * CHUNK_ROWS, -(-sizes["dimension"] // 4) * 4
    ) or not 0 < 4 * sizes["quads"] <= sizes["turned"] or sizes["rows"] < 1 or (
        sizes.get("digits", 0) != DIGITS * sizes.get("sixteens", 0)
    ):  # fmt: skip
        raise CorruptionError(f"{path}: the arrays of the decoder do not fit each other: {sizes}")
    return sizes


def check_settings(
    settings: Settings, sizes: dict[str, int], starts: npt.NDArray[np.int64] | None, path: object
) -> None:
    """Raise CorruptionError if a search with these settings does not fit the arrays."""
    ways = {way for _, way in settings.choices}
    most = max(sizes["rows"], 2**16)
    counts = [value for name in _SETTINGS if isinstance(value := getattr(settings, name), int)]
    width = settings.coarse_width
    coarse = width == 0 or (
        width % 4 == 0
        and width <= 4 * sizes["quads"] == sizes.get("width")
        and settings.survivors >= settings.preview_limit
    )
    digits = settings.digit_survivors == 0 or (
        "digits" in sizes
        and 4 * sizes["quads"] == sizes.get("width")
        and settings.digit_survivors >= settings.digit_limit >= 1
    )
    walks = starts is not None or not (ways & {"graph", "screen"} or settings.far_ef)
    sound = starts is None or (
        len(starts) == sizes["groups"] + 1
        and starts[0] == 0
        and starts[-1] == sizes["seeds"]
        and bool((starts[1:] >= starts[:-1]).all())
    )
    if max(counts) > most or settings.k > sizes["rows"] or not (coarse and digits and walks and sound):
        raise CorruptionError(f"{path}: {settings} do not fit arrays of {sizes}")
