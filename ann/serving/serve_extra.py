"""The names of Ray Serve, FastAPI and others that serving needs, or the error that says how to install them."""

import warnings

try:
    import ray
    from fastapi import FastAPI, HTTPException, Request, Response
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
    from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema
    from pydantic_core import to_json

    with warnings.catch_warnings():  # of Ray about its own use of pydantic
        warnings.simplefilter("ignore")
        from ray import serve
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"memhier.ann.serving needs {error.name}: pip install 'memhier[serve]'", name="fastapi"
    ) from error

__all__ = [
    "BaseModel",
    "CollectorRegistry",
    "ConfigDict",
    "Counter",
    "FastAPI",
    "Field",
    "Gauge",
    "HTTPException",
    "Histogram",
    "Request",
    "Response",
    "ValidationError",
    "WithJsonSchema",
    "generate_latest",
    "ray",
    "serve",
    "to_json",
]
