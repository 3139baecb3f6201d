"""Which implementation of the core is in use: the compiled one, or the equal one in Python.

``MEMHIER_NATIVE=1`` insists on the compiled core, ``MEMHIER_NATIVE=0`` on Python; unset takes the compiled core if it
can be imported. Every other module asks :data:`core` and nothing else.
"""

import importlib
import os
from types import ModuleType

__all__ = ["core", "name"]


def _load_core() -> ModuleType | None:
    wanted = os.environ.get("MEMHIER_NATIVE")
    if wanted not in (None, "0", "1"):
        raise ValueError(f"MEMHIER_NATIVE={wanted!r}: expected 1 (compiled core), 0 (pure Python), or unset")
    if wanted == "0":
        return None
    try:
        return importlib.import_module("memhier_native._core")
    except ImportError as error:
        if wanted == "1":
            raise ImportError(
                f"MEMHIER_NATIVE=1, but the compiled core cannot be imported ({error}); build it with 'make build', "
                "or unset MEMHIER_NATIVE to run in Python"
            ) from error
        return None


core: ModuleType | None = _load_core()
"""The compiled core, or None when Python stands in for it."""

name: str = "python" if core is None else "native"
"""``"native"`` or ``"python"``."""
