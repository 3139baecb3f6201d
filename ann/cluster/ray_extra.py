"""The names of Ray that shards need, or the error that says how to install it."""

try:
    import ray
    from ray.exceptions import RayActorError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("memhier.ann.cluster needs ray: pip install 'memhier[ray]'", name="ray") from error

__all__ = ["NodeAffinitySchedulingStrategy", "RayActorError", "RayTaskError", "ray"]
