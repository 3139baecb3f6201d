"""The Python files that the demo reads: the standard library and the installed packages of this interpreter."""

import hashlib
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["SourceFile", "fingerprint", "installed_roots", "source_files"]

# Tests repeat the code that they test, and the standard library's hold files that are broken on purpose.
SKIPPED_FOLDERS = frozenset({"__pycache__", "test", "tests", "idle_test"})
PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})
# Import hooks that installers write for editable packages: new at every rebuild, and no author's code.
_EDITABLE = re.compile(r"__editable__.*|_\w+_editable\.py")


class SourceFile(NamedTuple):
    """A Python file and the dotted name it is imported by."""

    path: str
    module: str


def installed_roots() -> list[Path]:
    """Return the folders that hold the standard library and the installed packages, each once.

    Raises
    ------
    FileNotFoundError
        When the interpreter has no library folder on disk (a zipped or frozen installation).
    """
    paths = sysconfig.get_paths()
    named = (Path(paths[key]).resolve() for key in ("stdlib", "platstdlib", "purelib", "platlib"))
    roots = [root for root in dict.fromkeys(named) if root.is_dir()]
    if not roots:
        raise FileNotFoundError(
            f"no library folder of this Python exists on disk, {paths['stdlib']} among them; "
            "the demo needs an installation that keeps its sources as .py files"
        )
    return roots


def source_files(roots: Sequence[Path]) -> Iterator[SourceFile]:
    """Yield every ``.py`` file under `roots`, in an order that depends on nothing but the names.

    Folders of tests are left out, and so are the package folders inside a standard library: they are roots themselves,
    or belong to another environment.

    Raises
    ------
    OSError
        When a root cannot be read.
    """
    for root in roots:
        os.scandir(root).close()  # os.walk would pass over a root that cannot be read without a word
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS - PACKAGE_FOLDERS)
            inside = Path(folder).relative_to(root).parts
            for name in sorted(names):
                if name.endswith(".py") and not _EDITABLE.match(name):
                    stem = name.removesuffix(".py")
                    parts = inside if stem == "__init__" else (*inside, stem)
                    yield SourceFile(os.path.join(folder, name), ".".join(parts))


def fingerprint(files: Iterable[SourceFile]) -> str:
    """Return a digest that changes when a file comes, goes or has another size.

    Times are left out: installing the same version again is no change.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        try:
            size = os.stat(file.path).st_size
        except OSError:
            continue  # a broken link, or a package being removed: it is not read either
        digest.update(f"{file.path}\0{size}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
