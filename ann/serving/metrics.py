"""Figures of a server for Prometheus."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from memhier.ann.serving.serve_extra import prometheus_client
from memhier.ann.zoom import SearchResult

__all__ = ["Metrics"]

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """Counts requests, errors by kind, seconds, batches and pages; :meth:`text` is the page for Prometheus."""

    def __init__(self) -> None:
        every = self._registry = prometheus_client.CollectorRegistry()
        self._requests = prometheus_client.Counter(
            "memhier_requests", "Search requests by status.", ["status"], registry=every
        )
        self._errors = prometheus_client.Counter(
            "memhier_errors", "Search requests refused or failed.", ["kind"], registry=every
        )
        self._seconds = prometheus_client.Histogram(
            "memhier_request_seconds", "Seconds of a search request.", buckets=_SECONDS, registry=every
        )
        self._active = prometheus_client.Gauge(
            "memhier_active_requests", "Search requests that run or wait.", registry=every
        )
        self._batches = prometheus_client.Histogram(
            "memhier_batch_requests", "Requests joined into one search.", buckets=_SIZES, registry=every
        )
        self._vectors = prometheus_client.Histogram(
            "memhier_batch_vectors", "Query vectors of one search.", buckets=_SIZES, registry=every
        )
        self._pages = prometheus_client.Counter(
            "memhier_pages_read", "Pages of 4 KiB read from SSD for vectors.", registry=every
        )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Count a request as active, and measure its seconds."""
        began = perf_counter()
        self._active.inc()
        try:
            yield
        finally:
            self._active.dec()
            self._seconds.observe(perf_counter() - began)

    def answered(self, status: int, kind: str | None = None) -> None:
        """Count an answer, and its kind of error."""
        self._requests.labels(str(status)).inc()
        if kind is not None:
            self._errors.labels(kind).inc()

    def searched(self, result: SearchResult, requests: int) -> None:
        """Count a search that answers a number of requests."""
        self._batches.observe(requests)
        self._vectors.observe(result.stats["queries"])
        self._pages.inc(result.stats["pages"])

    def text(self) -> bytes:
        """Return all figures in the text form of Prometheus."""
        page: bytes = prometheus_client.generate_latest(self._registry)
        return page
