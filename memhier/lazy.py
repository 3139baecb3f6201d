"""Names that a package loads when they are first asked for, and the extra that installs their packages."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["EXTRAS", "lazy"]

# The extra of pyproject.toml that brings each optional package.
EXTRAS = {
    "click": "cli", "faiss": "search", "fsspec": "remote", "ray": "ray", "rich": "cli", "torch": "torch",
    "tqdm": "search", "transformers": "transformers",
}  # fmt: skip


def lazy(
    package: str, homes: Mapping[str, str], shown: list[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package whose names load on use.

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
        If a module needs a package that is not installed. The message names the extra.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(homes[name]), name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in EXTRAS:
                raise
            needs = f"{package}.{name} needs the package {missing}: pip install 'memhier[{EXTRAS[missing]}]'"
            raise ModuleNotFoundError(needs, name=error.name) from error

    return load, lambda: sorted({*shown, *homes})
