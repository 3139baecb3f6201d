"""Opening a generation at a place for reading, with its pages cached on the local SSD."""

import os
from pathlib import Path

from memhier.arguments import is_url
from memhier.budget import parse_bytes
from memhier.errors import FormatError
from memhier.files import File, Mode, RealFiles
from memhier.remote.extent_cache import ExtentCache
from memhier.remote.far_side import manifest_of
from memhier.remote.place import Place
from memhier.remote.pull import contents_at
from memhier.remote.segment_cache import EXTENT_BYTES

__all__ = ["FarFiles", "open_far"]


class FarFiles(RealFiles):
    """The operating system's files, except that those of far segments bring their bytes when they are read."""

    def __init__(self, cache: ExtentCache) -> None:
        self.cache = cache

    def open(self, path: str, mode: Mode) -> File:
        """Open a file; that of a segment is its cache."""
        return self.cache.segments[path] if path in self.cache.segments else super().open(path, mode)


def open_far(url: str, kind: str, cache: str | os.PathLike[str] | None, cache_bytes: int | str) -> FarFiles:
    """Return the newest generation at a URL as the files of its segments; see `Store.open`."""
    limit = parse_bytes(cache_bytes, "cache_bytes")
    if limit < EXTENT_BYTES:
        raise ValueError(f"cache_bytes={cache_bytes!r}: expected at least {EXTENT_BYTES}, the bytes read at a time")
    if is_url(cache):
        raise ValueError(f"cache={cache!r}: expected a folder on this machine's SSD, not a URL")
    place = Place(url)
    manifest = manifest_of(place, None)
    if manifest.kind != kind:
        raise FormatError(f"{url}: holds a store of kind {manifest.kind!r}, expected {kind!r}")
    folder = _default_folder() if cache is None else Path(cache).absolute()
    contents, _ = contents_at(place, manifest, folder)
    return FarFiles(ExtentCache(place, folder, limit, manifest, contents))


def _default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memhier"
