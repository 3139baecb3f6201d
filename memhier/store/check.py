"""Walks a store and lists every inconsistency."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from memhier.errors import CorruptionError, FormatError
from memhier.files import Files
from memhier.store.catalog import Catalog
from memhier.store.contents import SegmentInfo
from memhier.store.segment_files import read_pages
from memhier.store.store_directory import LEFTOVER_NAMES, STORE_NAMES

__all__ = ["Finding", "check_segments", "check_store"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A file in a store that should not be there, or is not as it was committed.

    Attributes
    ----------
    path
        The file.
    problem
        The damage, or the reason why it should not be there.
    harmless
        True for a file left by a crash or kept for a reader: it takes space and nothing else.
    """

    path: str
    problem: str
    harmless: bool

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}{' (harmless)' if self.harmless else ''}"


def check_store(files: Files, root: str, segments: Iterable[SegmentInfo]) -> list[Finding]:
    """Return every inconsistency of the store at `root`; `segments` are those of the open generation."""
    expected: dict[str, SegmentInfo] = {info.path.name: info for info in segments}
    findings = [*_check_catalog(files, root), *check_segments(files, expected.values())]
    for directory, known in (("", STORE_NAMES), ("segments", expected.keys()), ("tmp", set())):
        path = os.path.join(root, directory)
        names = files.list(path) if files.exists(path) else []
        findings.extend(
            Finding(os.path.join(path, name), "not part of the open generation", harmless=True)
            for name in names
            if name not in known or name in LEFTOVER_NAMES
        )
    return findings


def check_segments(files: Files, segments: Iterable[SegmentInfo]) -> list[Finding]:
    """Return every inconsistency of the segments alone."""
    return [finding for info in segments for finding in _check_segment(files, info)]


def _check_catalog(files: Files, root: str) -> Iterator[Finding]:
    try:
        Catalog(files, root).read()
    except (CorruptionError, FormatError, OSError) as error:
        yield Finding(os.path.join(root, "catalog"), str(error), harmless=False)


def _check_segment(files: Files, info: SegmentInfo) -> Iterator[Finding]:
    try:
        with files.open(str(info.path), "r") as file:
            if file.size() > info.length:
                yield Finding(
                    str(info.path), f"{file.size() - info.length} bytes past the committed end", harmless=True
                )
            for page in read_pages(file, info):
                yield Finding(str(info.path), f"page {page} does not match its checksum", harmless=False)
    except (CorruptionError, OSError) as error:
        yield Finding(str(info.path), str(error), harmless=False)
