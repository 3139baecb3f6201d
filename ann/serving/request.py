"""A search request: its form in JSON and in binary, and the errors of both."""

import io
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.serving.serve_extra import pydantic
from memhier.errors import FormatError
from memhier.io.outside import npy_header

__all__ = ["BINARY", "SearchRequest", "read_binary", "read_json"]

BINARY = "application/octet-stream"
_Ids: TypeAlias = list[int | None] | list[str | None] | None  # null stands for no neighbour in answers
_VECTORS = {
    "description": "Query vectors [q, d], or one vector [d].",
    "anyOf": [
        {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
        {"type": "array", "items": {"type": "number"}},
    ],
}


class SearchRequest(pydantic.BaseModel):
    """Queries and options of one search, as ``ZoomIndex.search`` takes them."""

    model_config: ClassVar[pydantic.ConfigDict] = pydantic.ConfigDict(
        extra="forbid", strict=True, frozen=True,
        json_schema_extra={"example": {"vectors": [[0.1, 0.2, 0.3]], "k": 10, "recall": 0.95}},
    )  # fmt: skip

    vectors: Annotated[Any, pydantic.WithJsonSchema(_VECTORS)]
    k: Annotated[int, pydantic.Field(description="Neighbours of each query.", ge=1)] = 10
    recall: Annotated[
        float | None, pydantic.Field(description="Share of the true neighbours to find; 0.99 by default.")
    ] = None
    where: Annotated[str | None, pydantic.Field(description="A filter on attributes, such as \"lang == 'en'\".")] = None
    fields: Annotated[
        bool | list[str] | None, pydantic.Field(description="Attributes and documents to return; true for all.")
    ] = None
    candidates: Annotated[int | None, pydantic.Field(description="Vectors to read in place of a recall.")] = None
    nprobe: Annotated[int | None, pydantic.Field(description="Lists to scan in place of a recall.")] = None
    max_reads: Annotated[int | None, pydantic.Field(description="Pages read for one query at most.")] = None
    deadline_ms: Annotated[
        float | None, pydantic.Field(description="Milliseconds of a search after which no further reads start.")
    ] = None
    radius: Annotated[float | None, pydantic.Field(description="The largest distance wanted.")] = None
    allow: Annotated[_Ids, pydantic.Field(description="Ids: search only these vectors.")] = None
    deny: Annotated[_Ids, pydantic.Field(description="Ids: search all vectors but these.")] = None
    partial: Annotated[
        bool | None, pydantic.Field(description="Answer without the shards that are lost; of sharded indexes alone.")
    ] = None

    def options(self) -> dict[str, Any]:
        """Return the options given, by name."""
        return self.model_dump(exclude={"vectors", "k"}, exclude_none=True)


def read_json(body: bytes) -> SearchRequest:
    """Return the request in a body of JSON.

    Raises
    ------
    FormatError
        When the body is no JSON.
    ValueError
        When a value has a wrong type, or a name is unknown.
    """
    return _read(lambda: SearchRequest.model_validate_json(body))


def read_binary(body: bytes, options: Mapping[str, Any]) -> SearchRequest:
    """Return the request of vectors in a body in the form of a .npy file, and of options as texts.

    Raises
    ------
    FormatError
        When the body is no .npy file, or does not hold the numbers that its header says.
    ValueError
        When an option has a wrong value, or its name is unknown.
    """
    file = io.BytesIO(body)
    shape, by_column, dtype = npy_header(file, "the body", len(body))
    if dtype.hasobject:
        raise FormatError("the body holds Python objects: expected numbers, such as float32")
    vectors: npt.NDArray[Any] = np.frombuffer(body, dtype, int(np.prod(shape)), file.tell())
    vectors = vectors.reshape(shape, order="F" if by_column else "C")
    return _read(lambda: SearchRequest.model_validate({**options, "vectors": vectors}, strict=False))


def _read(validate: Any) -> SearchRequest:
    """Return a valid request, or raise an error in the house's words."""
    try:
        request: SearchRequest = validate()
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        said = first["msg"][0].lower() + first["msg"][1:]
        if first["type"] == "json_invalid":
            raise FormatError(f"the body is {said}") from None
        name = ".".join(str(part) for part in first["loc"][:1]) or "the body"
        if first["type"] == "extra_forbidden":
            raise ValueError(f"{name}: expected one of {', '.join(SearchRequest.model_fields)}") from None
        shown = "" if first["type"] == "missing" else f"={str(first['input'])[:80]!r}"
        raise ValueError(f"{name}{shown}: {said}") from None
    return request
