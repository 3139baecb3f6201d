"""Concurrent requests with equal options, joined into one search.

A search starts at once while fewer than a fixed number run. Requests that come meanwhile wait for the first of these to
end, and are then joined: an idle server waits for nothing, and a busy one searches in ever larger batches.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom import SearchResult

__all__ = ["Batcher"]

Floats: TypeAlias = npt.NDArray[np.float32]
Options: TypeAlias = tuple[tuple[str, Any], ...]


@dataclass(slots=True)
class _Asked:
    """The queries of a request, and the place of its answer."""

    queries: Floats
    answer: "asyncio.Future[SearchResult]"


class Batcher:
    """Joins the requests of one event loop into searches in threads; requests with unlike options never share one.

    Parameters
    ----------
    search
        Takes queries ``[q, d]`` and options by name.
    max_batch
        Queries of one search. A request with more is searched alone.
    searches
        Searches that run at a time.
    watch
        Called with each result, and the number of requests that it answers.
    """

    def __init__(
        self, search: Callable[..., SearchResult], max_batch: int, searches: int,
        watch: Callable[[SearchResult, int], None],
    ) -> None:  # fmt: skip
        self._search, self._max_batch, self._searches, self._watch = search, max_batch, searches, watch
        self._threads = ThreadPoolExecutor(searches, "search")
        self._waiting: dict[Options, list[_Asked]] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def search(self, queries: Floats, options: dict[str, Any]) -> SearchResult:
        """Return the result for queries ``[q, d]``, searched together with others of equal options.

        Its `stats` are those of the whole search. An error of the search is raised for each of its requests.
        """
        loop = asyncio.get_running_loop()
        asked = _Asked(queries, loop.create_future())
        self._waiting.setdefault(_key(options), []).append(asked)
        loop.call_soon(self._start)  # after those that the loop has read already
        return await asked.answer

    def close(self) -> None:
        """Wait for searches that run, and end their threads."""
        self._threads.shutdown()

    def _start(self) -> None:
        """Start searches as long as some wait and fewer than the limit run; options take turns."""
        while self._waiting and len(self._running) < self._searches:
            options = next(iter(self._waiting))
            batch, rest = self._cut(self._waiting.pop(options))
            if rest:
                self._waiting[options] = rest
            if batch:
                task = asyncio.get_running_loop().create_task(self._run(dict(options), batch))
                self._running.add(task)
                task.add_done_callback(self._ended)

    def _cut(self, asked: list[_Asked]) -> tuple[list[_Asked], list[_Asked]]:
        """Return the first requests that fit one search, and the rest, without those whose clients left."""
        there = [each for each in asked if not each.answer.done()]
        ends = np.cumsum([len(each.queries) for each in there])
        count = max(1, int(np.searchsorted(ends, self._max_batch, side="right")))
        return there[:count], there[count:]

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        self._start()

    async def _run(self, options: dict[str, Any], batch: list[_Asked]) -> None:
        """Search for all requests of a batch, and give each its part of the result."""
        matrix = np.concatenate([each.queries for each in batch]) if len(batch) > 1 else batch[0].queries
        call = partial(self._search, matrix, **options)
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._threads, call)
            self._watch(result, len(batch))
        except Exception as error:  # each request tells it to its client
            for each in batch:
                if not each.answer.done():
                    each.answer.set_exception(error)
            return
        start = 0
        for each in batch:
            rows = slice(start, start + len(each.queries))
            start = rows.stop
            if not each.answer.done():
                fields = {name: column[rows] for name, column in result.fields.items()}
                each.answer.set_result(SearchResult(result.ids[rows], result.distances[rows], result.stats, fields))


def _key(options: dict[str, Any]) -> Options:
    return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in sorted(options.items()))
