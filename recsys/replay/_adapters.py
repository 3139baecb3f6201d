"""Classes of other libraries to derive from, imported when an object is made: they need not be there before."""

from importlib import import_module
from typing import Any

__all__ = ["derived"]


_MADE: dict[tuple[Any, str], Any] = {}


def derived(kind: Any, module: str, base: str, package: str) -> Any:
    """Return a class that derives from `kind` and from a class of a module, in this order.

    Raises
    ------
    ImportError
        When the module cannot be imported; it says which package to install.
    """
    try:
        parent = getattr(import_module(module), base)
    except ImportError as error:
        raise ImportError(f"{kind.__name__} needs the package {package} ({error}): pip install {package}") from error
    if issubclass(kind, parent):
        return kind
    if (kind, base) not in _MADE:
        about = {"__doc__": kind.__doc__, "__module__": kind.__module__}
        _MADE[kind, base] = type(parent)(kind.__name__, (kind, parent), about)
    return _MADE[kind, base]
