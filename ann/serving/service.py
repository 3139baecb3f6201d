"""Search requests answered: token, limits, values, the search itself, and the form of the answer."""

import asyncio
import inspect
import io
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np

from memhier.ann.serving.batching import Batcher
from memhier.ann.serving.follower import Follower
from memhier.ann.serving.metrics import Metrics
from memhier.ann.serving.options import ServingOptions
from memhier.ann.serving.request import BINARY, SearchRequest, read_binary, read_json
from memhier.ann.serving.serve_extra import fastapi, pydantic_core
from memhier.ann.zoom import SearchResult, ZoomIndex
from memhier.ann.zoom.arguments import check_queries
from memhier.errors import FormatError, ShardLostError

if TYPE_CHECKING:
    from memhier.ann.cluster import ShardedIndex

__all__ = ["Index", "SearchService"]

Index: TypeAlias = Union[ZoomIndex, "ShardedIndex"]

_TOLD = ("queries", "pages", "recall", "escalated", "stopped_early", "lost_shards")
_LATER = {"Retry-After": "1"}
_DRAIN_PAUSE = 0.02


class SearchService:
    """Answers requests for one open index.

    Parameters
    ----------
    index
        Open for searching. :meth:`close` closes it.
    options
        The limits.

    Attributes
    ----------
    options
        The limits.
    metrics
        The figures of all requests.
    draining
        Whether new requests are refused.
    """

    def __init__(self, index: Index, options: ServingOptions) -> None:
        self.options: ServingOptions = options
        self.metrics: Metrics = Metrics()
        self.draining: bool = False
        self._index, self._active = index, 0
        self._batcher = Batcher(index.search, options.max_batch, options.searches, self.metrics.searched)
        self._known = {*inspect.signature(index.search).parameters}
        self._id_kind: str = index.stats()["id_kind"]
        seconds = options.refresh_seconds
        self._follower = None if seconds is None else Follower(index, seconds)

    async def answer(self, request: fastapi.Request) -> fastapi.Response:
        """Answer a search request.

        Raises
        ------
        fastapi.HTTPException
            400 for a body that cannot be parsed, 401, 413, 415, 422 for values that the index refuses, 503 while as
            many requests as are allowed run, or the server ends.
        """
        with self.metrics.active():
            try:
                response = await self._admitted(request)
            except _Refusal as error:
                self.metrics.answered(error.status_code, error.kind)
                raise
            except asyncio.CancelledError:
                self.metrics.answered(499, "client left")
                raise
            except BaseException:
                self.metrics.answered(500, "internal")
                raise
        self.metrics.answered(200)
        return response

    def check_token(self, request: fastapi.Request) -> None:
        """Refuse a request without the token."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if not self.options.knows(token.strip() if scheme.lower() == "bearer" else ""):
            raise _Refusal(401, "token", "expected the header 'Authorization: Bearer TOKEN' with the token of this "
                           "server", {"WWW-Authenticate": "Bearer"})  # fmt: skip

    async def drain(self) -> None:
        """Refuse new requests from now on, and wait until none runs."""
        self.draining = True
        while self._active:
            await asyncio.sleep(_DRAIN_PAUSE)

    def facts(self) -> dict[str, Any]:
        """Return plain facts about the index, and the error of the last look for a newer commit, if it failed."""
        failure = None if self._follower is None else self._follower.failure
        return {
            "status": "draining" if self.draining else "ok", "vectors": len(self._index),
            "dimension": self._index.dimension, "metric": self._index.metric, "fields": self._index.fields,
            **({} if failure is None else {"refresh_failure": failure}),
        }  # fmt: skip

    def close(self) -> None:
        """Wait for searches that run, and close the index."""
        if self._follower is not None:
            self._follower.close()
        self._batcher.close()
        self._index.close()

    async def _admitted(self, request: fastapi.Request) -> fastapi.Response:
        self.check_token(request)
        if self.draining:
            raise _Refusal(503, "draining", "the server ends", _LATER)
        if self._active >= self.options.max_requests:
            raise _Refusal(503, "busy", f"{self._active} requests run: expected fewer", _LATER)
        self._active += 1
        try:
            return await self._searched(request)
        finally:
            self._active -= 1

    async def _searched(self, request: fastapi.Request) -> fastapi.Response:
        body = await self._body(request)
        try:
            asked = _parsed(body, request, self._id_kind)
            self._check(asked)
            matrix, single = check_queries(asked.vectors, self._index.dimension)
            self._check_size(len(matrix), asked)
            found = await self._batcher.search(matrix, {"k": asked.k, **asked.options()})
            if single:
                fields = {name: column[0] for name, column in found.fields.items()}
                found = SearchResult(found.ids[0], found.distances[0], found.stats, fields)
            return _response(found, asked, request.headers.get("accept", "") == BINARY)
        except FormatError as error:
            raise _Refusal(400, "format", str(error)) from error
        except ShardLostError as error:
            raise _Refusal(503, "shard lost", str(error), _LATER) from error
        except (ValueError, TypeError) as error:
            raise _Refusal(422, "value", str(error)) from error

    async def _body(self, request: fastapi.Request) -> bytes:
        """Return the body, of which no more is read than is allowed."""
        most, chunks, size = self.options.max_body, list[bytes](), 0
        told = request.headers.get("content-length", "")
        if told.isdecimal() and int(told) > most:
            size = int(told)
        else:
            async for chunk in request.stream():
                size += len(chunk)
                if size > most:
                    break
                chunks.append(chunk)
        if size > most:
            raise _Refusal(413, "size", f"the body has {size:,} bytes or more: expected at most {most:,}")
        return b"".join(chunks)

    def _check(self, asked: SearchRequest) -> None:
        for name in asked.options():
            if name not in self._known:
                raise ValueError(f"{name}: {type(self._index).__name__} has no such option: leave it out")
        if asked.k > self.options.max_k:
            raise ValueError(f"k={asked.k}: expected at most {self.options.max_k}, a limit of this server")

    def _check_size(self, count: int, asked: SearchRequest) -> None:
        if count > self.options.max_vectors:
            raise _Refusal(413, "size", f"vectors has {count} rows: expected at most {self.options.max_vectors}")
        if count * asked.k > self.options.max_hits:
            raise _Refusal(413, "size", f"{count} vectors with k={asked.k}: expected at most {self.options.max_hits} "
                           f"neighbours in all")  # fmt: skip


class _Refusal(fastapi.HTTPException):
    """An answer other than a result, and its kind in the metrics."""

    def __init__(self, status: int, kind: str, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, detail, headers)
        self.kind = kind


def _parsed(body: bytes, request: fastapi.Request, id_kind: str) -> SearchRequest:
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind == "application/json":
        return read_json(body)
    if kind == BINARY:
        options: dict[str, Any] = dict(request.query_params)
        if fields := request.query_params.getlist("fields"):
            options["fields"] = True if fields == ["true"] else fields
        for name in options.keys() & {"allow", "deny"}:
            options[name] = _as_ids(name, request.query_params.getlist(name), id_kind)
        return read_binary(body, options)
    raise _Refusal(415, "format", f"content-type {kind!r}: expected application/json or {BINARY}")


def _as_ids(name: str, texts: list[str], id_kind: str) -> list[int] | list[str]:
    """Return ids of a query of HTTP in the type of those of the index, without the empty ones of binary answers."""
    texts = [text for text in texts if text]
    try:
        return texts if id_kind == "str" else [int(text) for text in texts]
    except ValueError:
        raise ValueError(f"{name}={texts!r:.80}: this index has integers as ids, so expected integers") from None


def _response(found: SearchResult, asked: SearchRequest, binary: bool) -> fastapi.Response:
    """Return ids and distances as a .npy file, or as JSON with stats and rows."""
    if binary:
        if asked.fields:
            raise ValueError("fields: an answer in binary holds none: accept application/json")
        ids = found.ids if found.ids.dtype != object else np.where(found.ids == None, "", found.ids).astype(str)  # noqa: E711
        pairs = np.empty(ids.shape, [("id", ids.dtype), ("distance", np.float32)])
        pairs["id"], pairs["distance"] = ids, found.distances
        file = io.BytesIO()
        np.save(file, pairs)
        return fastapi.Response(file.getvalue(), media_type=BINARY)
    answer: dict[str, Any] = {
        "ids": found.ids.tolist(), "distances": found.distances.tolist(),
        "stats": {name: found.stats[name] for name in _TOLD if name in found.stats},
    }  # fmt: skip
    if asked.fields:
        answer["rows"] = found.rows()
    return fastapi.Response(
        pydantic_core.to_json(answer, inf_nan_mode="null", bytes_mode="base64"), media_type="application/json"
    )
