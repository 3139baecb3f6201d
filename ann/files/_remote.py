"""Files that lie elsewhere, by URL: read through fsspec."""

import re
from importlib import import_module
from typing import Any

from memhier.lazy import extra_for

__all__ = ["is_local", "open_remote"]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)")


def is_local(path: str) -> bool:
    """Whether this is a path of the operating system's, not a URL or a chain of them."""
    return _URL.match(path) is None


def open_remote(url: str) -> Any:
    """Open the file of a URL for reading; it is read by ranges, with the settings that fsspec has for its protocol.

    Raises
    ------
    OSError
        When there is no such file.
    ImportError
        When fsspec, or the package of the URL's protocol, is not installed.
    ValueError
        When fsspec does not know the protocol.
    """
    with extra_for(f"{url}: a URL"):
        fsspec = import_module("fsspec")
    return fsspec.open(url, "rb").open()
