"""A copy of one generation of a store, checked page by page on the way."""

import mmap
from contextlib import suppress
from pathlib import Path

import numpy as np

from memhier.errors import CorruptionError
from memhier.files import Files
from memhier.io.kernels import crc32c_pages
from memhier.shield import check_interrupt
from memhier.store.catalog import Catalog
from memhier.store.contents import PAGE_BYTES, Contents, SegmentInfo, segment_file_name
from memhier.store.store_directory import clear_directory

__all__ = ["copy_contents"]

_BLOCK_BYTES = 4 * 2**20


def copy_contents(files: Files, contents: Contents, root: Path) -> None:
    """Copy segments and catalog into the unfinished store at `root`, and publish it. The caller holds its lock.

    The store stays unfinished until the last step, and after a failure: the next store made there takes it over.
    """
    segments = root / "segments"
    try:
        for info in contents.segments.values():
            _copy_segment(files, info, str(segments / segment_file_name(info.name, info.generation)))
        files.sync_directory(str(segments))
    except BaseException:
        with suppress(OSError):
            clear_directory(files, segments)
        raise
    # The one step from nothing to this generation.
    before = Contents(contents.kind, contents.generation - 1)
    _, entries = before.changed(dict(contents.values), contents.segments.values(), ())
    catalog = Catalog(files, str(root))
    catalog.commit(entries)
    catalog.publish()


def _copy_segment(files: Files, info: SegmentInfo, path: str) -> None:
    assert info.checksums is not None
    # A map begins on a page, as direct writes demand.
    buffer = np.frombuffer(mmap.mmap(-1, _BLOCK_BYTES), np.uint8)
    with files.open(str(info.path), "r") as source, files.open(path, "d") as target:
        for start in range(0, info.length, _BLOCK_BYTES):
            check_interrupt()
            block = buffer[: min(_BLOCK_BYTES, info.length - start)]
            if source.read_into(block.data, start) != len(block):
                raise CorruptionError(f"{info.path}: {source.size()} bytes, but {info.length} were committed")
            first = start // PAGE_BYTES
            wrong = crc32c_pages(block) != info.checksums[first : first + len(block) // PAGE_BYTES]
            if wrong.any():
                page = first + int(np.argmax(wrong))
                raise CorruptionError(f"{info.path}: page {page} does not match its checksum; nothing was copied")
            target.append(block.data)
        target.fdatasync()
