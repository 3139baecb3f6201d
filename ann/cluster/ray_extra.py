"""The names of Ray that shards need, or the error that says how to install it."""

from memhier.lazy import extra_for

with extra_for("memhier.ann.cluster"):
    import ray
    from ray.exceptions import (
        ActorUnschedulableError,
        NodeDiedError,
        ObjectLostError,
        RayActorError,
        RayTaskError,
        TaskUnschedulableError,
    )
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

__all__ = ["GONE", "NodeAffinitySchedulingStrategy", "RayActorError", "RayTaskError", "ray"]

GONE = (RayActorError, ActorUnschedulableError, TaskUnschedulableError, NodeDiedError, ObjectLostError)
"""The errors of Ray where a process or a node is lost. Ray still lists a lost node as alive for some 15 seconds."""
