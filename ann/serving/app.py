"""The pages of a server: search, health, metrics, and their description as OpenAPI."""

from typing import Any

from memhier.ann.serving.request import BINARY, SearchRequest
from memhier.ann.serving.serve_extra import fastapi
from memhier.ann.serving.service import SearchService

__all__ = ["build_app"]

_REFUSALS = {
    400: "The body cannot be parsed.",
    401: "The token is missing or wrong.",
    413: "The body, the vectors or the neighbours are too many.",
    415: "The body is neither JSON nor binary.",
    422: "The index refuses a value: a wrong dimension, NaN, a filter or a field that it lacks.",
    503: "Too many requests run, or the server ends: come back after Retry-After seconds.",
}


def build_app(service: SearchService) -> fastapi.FastAPI:
    """Return the application of a service."""
    app = fastapi.FastAPI(title="memhier", description="Search a vector index on SSD.", version="1")

    async def search(request: fastapi.Request) -> fastapi.Response:
        """Return the nearest vectors of each query: ids, distances, stats, and rows where fields are asked for.

        An id of -1 (null for text) beside a distance of null stands where there are fewer than k.
        """
        return await service.answer(request)

    async def health(response: fastapi.Response) -> dict[str, Any]:
        """Return facts about the index; 503 once the server ends."""
        response.status_code = 503 if service.draining else 200
        return service.facts()

    async def metrics(request: fastapi.Request) -> fastapi.Response:
        """Return figures for Prometheus."""
        service.check_token(request)
        return fastapi.Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    app.add_api_route(
        "/search", search, methods=["POST"], openapi_extra=_body(service), responses=_responses(),
        response_class=fastapi.Response,
    )  # fmt: skip
    app.add_api_route("/health", health)
    app.add_api_route("/metrics", metrics, response_class=fastapi.Response)
    return app


def _body(service: SearchService) -> dict[str, Any]:
    """Describe the bodies of a search, and their limits."""
    limits, facts = service.options, service.facts()
    schema = SearchRequest.model_json_schema()
    schema["properties"]["k"]["maximum"] = limits.max_k
    schema["properties"]["vectors"]["description"] += (
        f" d = {facts['dimension']}, at most {limits.max_vectors} vectors, and {limits.max_hits} vectors times k; the "
        f"body has at most {limits.max_body} bytes."
    )
    schema["example"]["vectors"] = [[0.0] * facts["dimension"]]
    options = {name: each for name, each in schema["properties"].items() if name != "vectors"}
    binary = {"type": "string", "format": "binary", "description": "A .npy file of vectors; options in the query."}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema},
                                                      BINARY: {"schema": binary}}},
        "parameters": [{"name": name, "in": "query", "schema": each} for name, each in options.items()],
        "security": [] if limits.token_digest is None else [{"bearer": []}],
    }  # fmt: skip


def _responses() -> dict[int | str, dict[str, Any]]:
    whole = {"application/json": {"schema": {"type": "object", "properties": {
        "ids": {"type": "array"}, "distances": {"type": "array"}, "stats": {"type": "object"},
        "rows": {"type": "array"},
    }}}, BINARY: {"schema": {"type": "string", "format": "binary"}}}  # fmt: skip
    return {200: {"description": "The neighbours.", "content": whole},
            **{status: {"description": words} for status, words in _REFUSALS.items()}}  # fmt: skip
