"""The folder of a demo: one that was killed half way leaves nothing that looks finished.

``current/`` holds the last demo that was built to its end; ``building/`` the one being built, which takes its name in
the last step. A lock keeps two builds apart.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from memhier.errors import LockedError
from memhier.files import RealFiles

__all__ = ["Built", "Place", "default_folder"]

VERSION = 1  # of the files in a built demo; another version is built again
LOCK = "memhier-demo.lock"


def default_folder() -> Path:
    """Return the folder ``memhier-demo`` in the user's cache directory (``XDG_CACHE_HOME``, or else ``~/.cache``)."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says that a relative path is to be ignored.
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "memhier-demo"


@dataclass(frozen=True, slots=True)
class Built:
    """The sources and settings of a built demo.

    Attributes
    ----------
    fingerprint
        Of the source files, see :func:`memhier.benchmarks.cli.demo.sources.fingerprint`.
    seed, limit, dram
        As the user set them: None for no limit, or the default budget.
    version
        Of the files.
    """

    fingerprint: str
    seed: int
    limit: int | None
    dram: int | None
    version: int = VERSION


class Place:
    """The folder of a demo.

    Raises
    ------
    ValueError
        When `folder` is a file, or holds files that are no demo's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder: Path = folder.absolute()
        if not folder.exists():
            return
        if not folder.is_dir():
            raise ValueError(f"--dir {folder}: this is a file; name a folder that is new, empty, or an earlier demo's")
        if not (folder / LOCK).exists() and any(folder.iterdir()):
            raise ValueError(f"--dir {folder}: holds files that are no demo's; name a folder that is new or empty")

    @property
    def current(self) -> Path:
        """The last demo built to its end, if there is one."""
        return self.folder / "current"

    @property
    def building(self) -> Path:
        """The demo being built; nothing in it counts."""
        return self.folder / "building"

    def built(self) -> Built | None:
        """Return the sources of the current demo, or None when there is none of this version."""
        try:
            about = json.loads((self.current / "built.json").read_text())
            return Built(**about) if about["version"] == VERSION else None
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    @contextmanager
    def locked(self, *, shared: bool = False) -> Iterator[None]:
        """Hold the folder, which is made if need be: alone, or `shared` with other readers.

        Raises
        ------
        LockedError
            When another process holds it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with RealFiles().open(str(self.folder / LOCK), "a") as file:
            if not file.lock(exclusive=not shared):
                raise LockedError(
                    f"another `memhier demo` is at work in {self.folder}: wait for it, or give another folder by --dir"
                )
            yield

    @contextmanager
    def replaced(self, built: Built) -> Iterator[Path]:
        """Make a new demo in the folder given; it becomes the current one when the block ends without an error."""
        old = self.folder / "old"
        for remains in (self.building, old):
            if remains.exists():
                shutil.rmtree(remains)
        self.building.mkdir()
        try:
            yield self.building
        except BaseException:
            shutil.rmtree(self.building, ignore_errors=True)
            raise
        (self.building / "built.json").write_text(json.dumps(asdict(built)))
        if self.current.exists():
            self.current.rename(old)
        self.building.rename(self.current)
        shutil.rmtree(old, ignore_errors=True)
