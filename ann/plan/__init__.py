"""Plans of vector indexes: machines, DRAM, disk, reads and latency, calibrated by small indexes of a sample."""

from memhier.ann.plan.index_plan import IndexPlan, SearchWorkload
from memhier.ann.plan.planner import plan_index

__all__ = ["IndexPlan", "SearchWorkload", "plan_index"]
