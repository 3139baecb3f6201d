"""Names that a package loads when they are first asked for, and the extras that install optional packages."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

__all__ = ["EXTRAS", "extra_for", "lazy"]

# The extra of pyproject.toml that brings each optional package.
EXTRAS = {
    "PIL": "images", "click": "cli", "datasets": "datasets", "faiss": "search", "fastapi": "serve",
    "fsspec": "remote", "h5py": "hdf5", "langchain_core": "langchain", "lightning": "lightning",
    "llama_index": "llamaindex", "matplotlib": "plots", "pandas": "pandas", "pillow_jxl": "jxl", "polars": "polars",
    "prometheus_client": "serve", "pyarrow": "parquet", "ray": "ray",
    "rich": "cli", "scipy": "sklearn", "sklearn": "sklearn", "torch": "torch", "tqdm": "search",
    "transformers": "transformers", "zstandard": "zstd",
}  # fmt: skip


@contextmanager
def extra_for(user: str) -> Iterator[None]:
    """Import optional packages in a ``with`` block: the error for a missing one names the extra that installs it.

    Parameters
    ----------
    user
        The module, call or file that needs the packages; the message begins with it.

    Raises
    ------
    ModuleNotFoundError
        If a package is missing; as it came, if no extra brings the package.

    Examples
    --------
    >>> from memhier.lazy import extra_for
    >>> with extra_for("some.parquet"):
    ...     raise ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")
    Traceback (most recent call last):
    ModuleNotFoundError: some.parquet needs the package pyarrow: pip install 'memhier[parquet]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        needs = f"{user} needs the package {missing}: pip install 'memhier[{EXTRAS[missing]}]'"
        raise ModuleNotFoundError(needs, name=error.name) from error


class _AbsentType(type):
    """The type of a class whose package is missing: each use of the class raises the class's ``__refuse__``."""

    __refuse__: Callable[..., NoReturn]

    def __new__(cls, name: str, bases: tuple["_AbsentType", ...], members: dict[str, Any]) -> "_AbsentType":
        for base in bases:
            base.__refuse__()
        return super().__new__(cls, name, bases, members)

    def __call__(cls, *args: Any, **options: Any) -> NoReturn:
        cls.__refuse__()

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("_"):  # help(), completion and copy ask for such names
            raise AttributeError(name)
        cls.__refuse__()


def _absent(package: str, name: str, error: ModuleNotFoundError) -> Any:
    """Return a stand-in for a class or a function: help() and completion show it, and each use of it raises."""
    needs, error = str(error), error.with_traceback(None)

    def refuse(*args: Any, **options: Any) -> NoReturn:
        raise ModuleNotFoundError(needs, name=error.name) from error

    if not name[0].islower():
        return _AbsentType(
            name, (), {"__module__": package, "__doc__": needs, "__slots__": (), "__refuse__": staticmethod(refuse)}
        )
    refuse.__name__ = refuse.__qualname__ = name
    refuse.__module__, refuse.__doc__ = package, needs
    return refuse


def lazy(
    package: str, homes: Mapping[str, str], shown: list[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package whose names load on use.

    Where a name needs a package that is not installed, ``from package import name`` raises ModuleNotFoundError with the
    extra to install. ``package.name``, and the name that ``from package import *`` binds, is a stand-in, so that the
    other names come and ``help`` and completion show every name; a call, a subclass or a public attribute of it raises
    the same error.

    Parameters
    ----------
    package
        The name of the package.
    homes
        The module of each name.
    shown
        Names that the package binds itself.

    Raises
    ------
    AttributeError
        If the package has no such name.
    ModuleNotFoundError
        If a module lacks a package that no extra brings, or if an import statement asks for a missing name.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            with extra_for(f"{package}.{name}"):
                # The list asks as an import statement does, so that a package below this one raises, too.
                return getattr(__import__(homes[name], fromlist=[name]), name)
        except ModuleNotFoundError as error:
            from inspect import currentframe  # here alone: `import memhier` loads little

            frame = currentframe()
            caller = frame.f_back if frame is not None else None
            by_import = caller is not None and caller.f_globals.get("__name__") == "importlib._bootstrap"
            by_star = caller is not None and caller.f_locals.get("recursive") is True  # of _handle_fromlist there
            if (by_import and not by_star) or (error.name or "").partition(".")[0] not in EXTRAS:
                raise
            return _absent(package, name, error)

    return load, lambda: sorted({*shown, *homes})
