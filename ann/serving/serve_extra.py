"""The packages that serving needs, or the error that says how to install them."""

import warnings

try:
    import fastapi
    import prometheus_client
    import pydantic
    import pydantic_core
    import ray

    with warnings.catch_warnings():  # of Ray about its own use of pydantic
        warnings.simplefilter("ignore")
        from ray import serve
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"memhier.ann.serving needs {error.name}: pip install 'memhier[serve]'", name="fastapi"
    ) from error

__all__ = ["fastapi", "prometheus_client", "pydantic", "pydantic_core", "ray", "serve"]
