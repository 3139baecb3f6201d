"""The names of Ray that shards need, or the error that says how to install it."""

from memhier.lazy import extra_for

with extra_for("memhier.ann.cluster"):
    import ray
    from ray.exceptions import RayActorError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

__all__ = ["NodeAffinitySchedulingStrategy", "RayActorError", "RayTaskError", "ray"]
