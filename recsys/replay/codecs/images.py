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


class ImageCodec:
    """uint8 images packed as JPEG or WebP by Pillow; lossy.

    Parameters
    ----------
    name
        ``"jpeg"`` or ``"webp"``, with a quality after a colon: ``"jpeg:90"``. 90 by default.
    column
        Of shape ``[height, width]``, ``[height, width, 3]`` or ``[3, height, width]``; 1 for 3 is possible.
    """

    lossless = False
    row_bytes: int | None = None

    def __init__(self, name: str, column: Column) -> None:
        kind, _, quality = name.partition(":")
        if not (quality or "90").isdigit() or not 1 <= int(quality or 90) <= 100:
            raise ValueError(f"codec={name!r}: expected a quality of 1 to 100, such as '{kind}:90'")
        with extra_for(f"codec={name!r}"):
            self._image: Any = importlib.import_module("PIL.Image")
        self.name = name
        self._format, self._quality = kind.upper(), int(quality or 90)
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
            self.encode(np.zeros((1, *shape), np.uint8))
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"codec={name!r}: Pillow cannot pack images of shape {list(shape)}: {error}") from error

    def encode(self, values: NDArray[Any]) -> list[bytes]:
        return [self._encode_one(value) for value in self._channels_last(values)]

    def _encode_one(self, value: NDArray[np.uint8]) -> bytes:
        packed = io.BytesIO()
        plain = value[..., 0] if value.shape[2:] == (1,) else value
        self._image.fromarray(np.ascontiguousarray(plain)).save(packed, self._format, quality=self._quality)
        return packed.getvalue()

    def decode(self, data: Any, out: NDArray[Any]) -> None:
        for target, record in zip(self._channels_last(out), data, strict=True):
            try:
                with self._image.open(io.BytesIO(record)) as image:
                    mode = "RGB" if target.shape[2:] == (3,) else "L"
                    pixels = np.asarray(image if image.mode == mode else image.convert(mode))
                target[:] = pixels.reshape(target.shape)
            except (OSError, ValueError, SyntaxError) as error:
                raise CorruptionError(f"{self._format}: {error}") from error

    def _channels_last(self, values: NDArray[Any]) -> NDArray[Any]:
        return np.moveaxis(values, 1, -1) if self._first else values
