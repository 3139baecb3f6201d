"""A folder on a file system that fsspec knows, such as an object store; calls that fail are made again."""

import errno
import os
import re
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, TypeVar

from memhier.arguments import is_url
from memhier.errors import CorruptionError
from memhier.remote.parallel import each_in_parallel

__all__ = ["Place"]

T = TypeVar("T")

TRIES = 6
FIRST_WAIT_S = 0.05  # doubles with each try
_NEEDS = "a URL needs the package fsspec: pip install 'memhier[remote]'"
_FINAL = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    PermissionError: errno.EACCES,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
}
_UNABLE = (TypeError, NotImplementedError)  # raised by file systems of fsspec for calls and arguments that they lack
_MISUSE = (ValueError, ImportError, MemoryError)


class Place:
    """Objects by name below a URL. Many threads may use it, and a forked child.

    An error other than "not found", "exists" or "not permitted" is taken to be passing, as file systems have errors of
    their own: a call is made six times in all, with growing waits of 1.6 seconds in sum. So is an object that is short
    or does not pass its check.

    Parameters
    ----------
    url
        Of a folder, which need not exist. Its file system takes options from fsspec's configuration.

    Raises
    ------
    ModuleNotFoundError
        When fsspec is not installed, or the package that it needs for this URL.
    ValueError
        When fsspec does not know the URL's protocol, or the URL is malformed or names no folder.
    OSError
        When its file system cannot be reached.

    Attributes
    ----------
    url
        Without a slash at its end.
    folder
        The path of the folder where it is one of this machine, or else None.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        text = os.fspath(url)
        self.url: str = text.rstrip("/")
        # fsspec would make a folder with the colon; a drive of Windows has one letter
        if re.match(r"(?![A-Za-z]:)[^/]*:/", text) and not is_url(text):
            raise ValueError(f"url={text!r}: expected a URL such as 's3://bucket/folder', or the path of a folder")
        if not text.rpartition("://")[2].strip("/"):
            raise ValueError(f"url={text!r}: names no folder; expected a URL such as 's3://bucket/folder'")
        self._connect()

    def _connect(self) -> None:
        try:
            from fsspec.core import url_to_fs
            from fsspec.implementations.local import LocalFileSystem
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(_NEEDS, name=error.name) from error
        # A child of a fork must not share the connections of its parent, which fsspec keeps by their options.
        forked = {"skip_instance_cache": True} if hasattr(self, "_pid") else {}
        try:
            self._fs, root = url_to_fs(self.url, **forked)
        except ImportError as error:
            raise ModuleNotFoundError(f"{self.url}: {error}", name=error.name) from error
        except OSError as error:
            raise OSError(error.errno or errno.EIO, error.strerror or str(error), self.url) from error
        except (ValueError, TypeError) as error:
            raise ValueError(f"url={self.url!r}: {error}") from error
        self._root = str(root).rstrip("/")
        self.folder: str | None = self._root if isinstance(self._fs, LocalFileSystem) else None
        self._pid = os.getpid()

    def get(
        self, name: str, check: Callable[[bytes], None], start: int | None = None, stop: int | None = None
    ) -> bytes:
        """Return an object, or its bytes from `start` to `stop`.

        Parameters
        ----------
        check
            Raises CorruptionError for bytes that are not those expected.

        Raises
        ------
        FileNotFoundError
            When there is no such object.
        CorruptionError
            When the object did not pass the check, however often it was read.
        OSError
            When it could not be read.
        """

        def read(fs: Any) -> bytes:
            found = bytes(fs.cat_file(self._path(name), start=start, end=stop))
            if start is not None and stop is not None and len(found) != stop - start:
                raise OSError(errno.EIO, f"{len(found)} bytes came, expected {stop - start}", self.address(name))
            check(found)
            return found

        return self._again(name, read)

    def put(self, name: str, contents: bytes, *, new: bool = False) -> None:
        """Write an object whole.

        Parameters
        ----------
        new
            Raise FileExistsError if there is such an object.

        Raises
        ------
        FileExistsError, OSError
            When it could not be written.
        """

        def write(fs: Any) -> None:
            if self.folder is not None:
                self._put_durably(name, contents, new)
                return
            try:
                fs.pipe_file(self._path(name), contents, mode="create" if new else "overwrite")
            except Exception as error:
                fs.invalidate_cache()
                if new and not isinstance(error, FileExistsError) and fs.exists(self._path(name)):
                    raise FileExistsError(errno.EEXIST, str(error), self.address(name)) from error  # so says gcsfs
                raise

        self._again(name, write)

    def names(self, folder: str) -> list[str]:
        """Return the names of the objects in a folder at one time; none where there is no folder."""

        def look(fs: Any) -> list[str]:
            fs.invalidate_cache()
            try:
                # Without details: fsspec asks this machine's folders for them later, and leaves out those gone by then.
                found = fs.ls(self._path(folder), detail=False)
            except FileNotFoundError:
                return []
            return [str(each).rstrip("/").rpartition("/")[2] for each in found]

        return self._again(folder, look)

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the names of the objects in a folder with their bytes; none where there is no folder."""

        def look(fs: Any) -> dict[str, int]:
            fs.invalidate_cache()
            try:
                found = fs.ls(self._path(folder), detail=True)
            except FileNotFoundError:
                return {}
            return {
                each["name"].rstrip("/").rpartition("/")[2]: int(each["size"])
                for each in found
                if each["type"] == "file"
            }

        return self._again(folder, look)

    def remove(self, names: Collection[str]) -> None:
        """Remove objects; those that are gone already do no harm."""

        def remove(name: str) -> None:
            with suppress(FileNotFoundError):
                self._again(name, lambda fs: fs.rm_file(self._path(name)))

        each_in_parallel(remove, names)

    def address(self, name: str) -> str:
        """Return the URL of an object."""
        return f"{self.url}/{name}"

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _put_durably(self, name: str, contents: bytes, new: bool) -> None:
        path = self._path(name)
        folder, base = os.path.split(path)
        fresh = f"{folder}/.{base}.{os.getpid()}-{threading.get_ident()}"
        os.makedirs(folder, exist_ok=True)
        try:
            with open(fresh, "wb") as file:
                file.write(contents)
                file.flush()
                os.fsync(file.fileno())
            if new:
                os.link(fresh, path)
            else:
                os.replace(fresh, path)
        except FileNotFoundError as error:  # another process that prunes took the file for a leftover
            raise OSError(errno.EAGAIN, str(error), path) from error
        finally:
            if os.path.exists(fresh):
                os.remove(fresh)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _again(self, name: str, call: Callable[[Any], T]) -> T:
        """Make a call until it succeeds, a bounded number of times.

        Bytes that came damaged twice are so on the far side, whatever the last try fails of.
        """
        if self._pid != os.getpid():
            self._connect()
        damaged: list[CorruptionError] = []
        for attempt in range(TRIES):
            try:
                return call(self._fs)
            except tuple(_FINAL) as error:
                number = next(number for kind, number in _FINAL.items() if isinstance(error, kind))
                raise OSError(number, error.strerror or str(error), self.address(name)) from error
            except _UNABLE as error:
                said = f"its file system does not serve as a backup's: {error!r}"
                raise OSError(errno.ENOTSUP, said, self.address(name)) from error
            except Exception as error:
                if isinstance(error, _MISUSE) and not isinstance(error, CorruptionError):
                    raise
                if isinstance(error, CorruptionError):
                    damaged.append(error)
                if attempt < TRIES - 1:
                    time.sleep(FIRST_WAIT_S * 2**attempt)
                    continue
                if len(damaged) > 1 or error in damaged:
                    raise damaged[-1] from None
                code, why = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
                said = f"failed {TRIES} times, the last time with: {why or repr(error)}"
                raise OSError(code or errno.EIO, said, self.address(name)) from error
        raise AssertionError
