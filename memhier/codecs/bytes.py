"""The codecs of records behind :mod:`memhier.codecs`."""

import importlib
import threading
from typing import Any, ClassVar

from memhier.arguments import as_bytes
from memhier.errors import CorruptionError
from memhier.lazy import extra_for

__all__ = ["PlainBytesCodec", "ZstdCodec"]


class PlainBytesCodec:
    """Records as they are."""

    name: ClassVar[str] = "none"

    def encode(self, data: Any) -> bytes:
        return bytes(as_bytes("data", data))

    def decode(self, data: Any, bytes_max: int) -> bytes:
        view = as_bytes("data", data)
        _check_length(view.nbytes, bytes_max)
        return bytes(view)


class ZstdCodec:
    """Records packed by Zstandard, at the level its authors chose for speed and size together."""

    name: ClassVar[str] = "zstd"

    def __init__(self) -> None:
        with extra_for("codec='zstd'"):
            self._zstandard = importlib.import_module("zstandard")
        # zstandard's objects must not be used by two threads at a time, and cost too much to make for each record.
        self._of_thread = threading.local()

    def encode(self, data: Any) -> bytes:
        if not hasattr(self._of_thread, "packer"):
            self._of_thread.packer = self._zstandard.ZstdCompressor(level=3, write_content_size=True)
        packed: bytes = self._of_thread.packer.compress(as_bytes("data", data))
        return packed

    def decode(self, data: Any, bytes_max: int) -> bytes:
        if not hasattr(self._of_thread, "unpacker"):
            self._of_thread.unpacker = self._zstandard.ZstdDecompressor()
        view = as_bytes("data", data)
        try:
            # The length is read before anything is allocated: damaged bytes could claim terabytes.
            length = self._zstandard.frame_content_size(view)
            if length < 0:
                raise CorruptionError("zstd: expected a frame that gives its length")
            _check_length(length, bytes_max)
            record: bytes = self._of_thread.unpacker.decompress(view, allow_extra_data=False)
        except self._zstandard.ZstdError as error:
            raise CorruptionError(f"zstd: {error}") from error
        return record


def _check_length(length: int, bytes_max: int) -> None:
    if length > bytes_max:
        raise CorruptionError(f"a record of {length} bytes, expected at most {bytes_max}")
