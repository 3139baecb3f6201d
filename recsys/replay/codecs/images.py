"""Images packed by Pillow."""

import importlib
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.errors import CorruptionError
from memhier.lazy import extra_for
from memhier.recsys.replay.schema import Column

__all__ = ["ImageCodec"]


Formats = list[tuple[str, dict[str, Any]]]
"""Pillow's names of formats, and the options of each."""

_WEBP: dict[str, Any] = {"lossless": True, "quality": 75, "method": 3}
_LOSSLESS: dict[str, Formats] = {
    "png": [("PNG", {})],
    "webp:lossless": [("WEBP", _WEBP)],
    "lossless": [("PNG", {}), ("WEBP", _WEBP)],
    "jxl": [("JXL", {"lossless": True, "effort": 5})],
}


class ImageCodec:
    """uint8 images packed by Pillow.

    Parameters
    ----------
    name
        ``"jpeg"`` or ``"webp"``, with a quality after a colon: ``"jpeg:90"``. 90 by default. Without loss: ``"png"``,
        ``"webp:lossless"``, or ``"lossless"``, which keeps of each image the smaller one of these two; and ``"jxl"``,
        JPEG XL by the package ``pillow_jxl``. An image that they do not make smaller is kept as it is.
    column
        Of shape ``[height, width]``, ``[height, width, 3]`` or ``[3, height, width]``; 1 for 3 is possible.
    """

    row_bytes: int | None = None

    def __init__(self, name: str, column: Column) -> None:
        self.lossless: bool = name in _LOSSLESS
        self._formats = _LOSSLESS[name] if self.lossless else _lossy(name)
        self._bytes = column.bytes
        with extra_for(f"codec={name!r}"):
            self._image: Any = importlib.import_module("PIL.Image")
            if name == "jxl":
                importlib.import_module("pillow_jxl")  # which tells Pillow of the format
        self.name = name
        shape = column.shape
        plain, last, first = len(shape) == 2, len(shape) == 3 and shape[-1] in (1, 3), len(shape) == 3
        if column.dtype != np.uint8 or not (plain or last or (first and shape[0] in (1, 3))):
            raise ValueError(
                f"codec={name!r}: expected uint8 of shape [height, width], [height, width, 1 or 3] or "
                f"[1 or 3, height, width], got {column.dtype}{list(shape)}"
            )
        self._first = not plain and not last
        try:
            # Formats have limits of their own: WebP takes 16,383 pixels a side, and not every Pillow has it.
            self._packed(next(iter(self._channels_last(np.zeros((1, *shape), np.uint8)))))
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"codec={name!r}: Pillow cannot pack images of shape {list(shape)}: {error}") from error

    def encode(self, values: NDArray[Any]) -> list[bytes]:
        """Return each image packed, or its pixels where these are smaller."""
        return [self._encode_one(value) for value in self._channels_last(values)]

    def _encode_one(self, value: NDArray[np.uint8]) -> bytes:
        smallest = min(self._packed(value), key=len)
        return value.tobytes() if self.lossless and len(smallest) >= self._bytes else smallest

    def _packed(self, value: NDArray[np.uint8]) -> list[bytes]:
        plain = value[..., 0] if value.shape[2:] == (1,) else value
        image, found = self._image.fromarray(np.ascontiguousarray(plain)), []
        for kind, options in self._formats:
            packed = io.BytesIO()
            image.save(packed, kind, **options)
            found.append(packed.getvalue())
        return found

    def decode(self, data: Any, out: NDArray[Any]) -> None:
        """Fill `out`, ``[n, *shape]``, with the images; CorruptionError for one that is none."""
        for target, record in zip(self._channels_last(out), data, strict=True):
            if self.lossless and len(record) == self._bytes:
                target[:] = np.frombuffer(record, np.uint8).reshape(target.shape)
                continue
            try:
                with self._image.open(io.BytesIO(record)) as image:
                    mode = "RGB" if target.shape[2:] == (3,) else "L"
                    pixels = np.asarray(image if image.mode == mode else image.convert(mode))
                target[:] = pixels.reshape(target.shape)
            except (OSError, ValueError, SyntaxError, RuntimeError) as error:  # RuntimeError: JPEG XL
                raise CorruptionError(f"{self.name}: {error}") from error

    def _channels_last(self, values: NDArray[Any]) -> NDArray[Any]:
        return np.moveaxis(values, 1, -1) if self._first else values


def _lossy(name: str) -> Formats:
    """Return the format of a name with a quality."""
    kind, _, quality = name.partition(":")
    if not (quality or "90").isdigit() or not 1 <= int(quality or 90) <= 100:
        raise ValueError(f"codec={name!r}: expected a quality of 1 to 100, such as '{kind}:90'")
    return [(kind.upper(), {"quality": int(quality or 90)})]
