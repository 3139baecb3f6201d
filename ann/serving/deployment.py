"""The deployment of an index in Ray Serve."""

from os import PathLike
from typing import Any

from memhier.ann.serving.app import build_app
from memhier.ann.serving.options import ServingOptions
from memhier.ann.serving.serve_extra import fastapi, serve
from memhier.ann.serving.service import Index, SearchService
from memhier.ann.zoom import ZoomIndex
from memhier.arguments import is_url

__all__ = ["application", "is_sharded", "open_index"]

_SPARE = 64  # requests beyond the limit, that the service itself refuses


def open_index(path: str | PathLike[str]) -> Index:
    """Open an index for searching: a sharded one where a folder of this node holds shards, otherwise a single one."""
    if not is_sharded(path):
        return ZoomIndex.open(path)
    from memhier.ann.cluster import ShardedIndex

    return ShardedIndex.open(path)


def is_sharded(path: str | PathLike[str]) -> bool:
    """Return whether a folder of this node holds shards."""
    from memhier.ann.cluster.nodes import shard_folder

    return not is_url(str(path)) and any(shard_folder(str(path), 0, 0).parent.glob("shard-*-*"))


class IndexDeployment:
    """A replica: an open index behind its pages."""

    def __init__(self, path: str, options: ServingOptions) -> None:
        self._service = SearchService(open_index(path), options)

    def __serve_build_asgi_app__(self) -> fastapi.FastAPI:
        """Return the pages; Ray Serve asks for them."""
        return build_app(self._service)

    async def drain(self) -> None:
        """Refuse new requests, and wait until none runs."""
        await self._service.drain()


def application(path: str | PathLike[str], options: ServingOptions | None = None) -> Any:
    """Return an application of Ray Serve that searches an index, for ``ray.serve.run``.

    One replica opens the index at its start, and answers with the vectors that were committed then.

    Parameters
    ----------
    path
        Of a :class:`ZoomIndex`, or of a :class:`ShardedIndex` with a shard on the node of the replica.
    options
        Limits and token.

    Examples
    --------
    >>> from memhier.ann.serving import application
    >>> made = application("index")  # ray.serve.run(made) starts it
    """
    chosen = ServingOptions() if options is None else options
    made: Any = serve.deployment(serve.ingress()(IndexDeployment), name="memhier")
    most = chosen.max_requests + _SPARE
    return made.options(max_ongoing_requests=most, ray_actor_options={"num_cpus": 0}).bind(str(path), chosen)
