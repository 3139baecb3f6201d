"""The codec of a name."""

from memhier.recsys.replay.codecs.fields import FieldCodec, PackedCodec, RawCodec, RoundedCodec
from memhier.recsys.replay.codecs.images import ImageCodec
from memhier.recsys.replay.product import ProductCodes
from memhier.recsys.replay.schema import Column

__all__ = ["field_codec", "longest_of"]


def field_codec(name: str | ProductCodes, column: Column) -> FieldCodec:
    """Return the codec of that name for a column; product codes are one, once they fit it.

    Parameters
    ----------
    name
        ``"none"``, ``"fp16"``, ``"bf16"`` or ``"int8"`` (of float32), ``"zstd"``, or those of `ImageCodec`:
        ``"jpeg"`` or ``"webp"``, also with a quality, ``"png"``, ``"webp:lossless"``, ``"lossless"`` or ``"jxl"``.

    Raises
    ------
    ValueError, TypeError
        For any other name, or a column that it cannot hold.
    ImportError
        If the package that it needs is missing.
    """
    if isinstance(name, ProductCodes):
        name.check_column(column)
        return name
    kind = name.partition(":")[0] if isinstance(name, str) else name
    if kind in ("jpeg", "webp") or name in ("png", "lossless", "jxl"):
        return ImageCodec(name, column)
    if name == "none":
        return RawCodec(column)
    if name == "zstd":
        return PackedCodec(column)
    if name in ("fp16", "bf16", "int8"):
        return RoundedCodec(name, column)
    known = (
        "'none', 'fp16', 'bf16', 'int8', 'zstd', 'jpeg', 'webp', 'jpeg:<quality>', 'webp:<quality>', 'png', "
        "'webp:lossless', 'lossless' or 'jxl'"
    )
    raise ValueError(f"codec={name!r}: expected {known}")


def longest_of(codec: FieldCodec, column: Column) -> int:
    """Return how many bytes a value takes at most."""
    if codec.row_bytes is not None:
        return codec.row_bytes
    if codec.lossless and isinstance(codec, ImageCodec):
        return column.bytes
    if codec.lossless:
        return column.bytes + column.bytes // 128 + 512  # zstd of noise
    return 2 * column.bytes + 4096
