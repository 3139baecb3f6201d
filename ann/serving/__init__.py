"""An index behind HTTP: a Ray Serve deployment of a :class:`ZoomIndex` or a sharded index."""

from typing import TYPE_CHECKING

from memhier.ann.serving.options import ServingOptions
from memhier.lazy import lazy

if TYPE_CHECKING:
    from memhier.ann.serving.deployment import application
    from memhier.ann.serving.server import IndexServer

__all__ = ["IndexServer", "ServingOptions", "application"]

if not TYPE_CHECKING:  # a type checker would take any name for one of the package
    _HOMES = {"IndexServer": "memhier.ann.serving.server", "application": "memhier.ann.serving.deployment"}
    __getattr__, __dir__ = lazy(__name__, _HOMES, [*globals()])
