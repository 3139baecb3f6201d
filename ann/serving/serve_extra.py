"""The packages that serving needs, or the error that says how to install them."""

import warnings

from memhier.lazy import extra_for

with extra_for("memhier.ann.serving"), warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray about its own use of pydantic
    import fastapi
    import prometheus_client
    import pydantic
    import pydantic_core
    import ray
    from ray import serve

__all__ = ["fastapi", "prometheus_client", "pydantic", "pydantic_core", "ray", "serve"]
