"""Plans of tables and of replay buffers: machines, DRAM, disk, and the reads of a step."""

from memhier.recsys.plan.replay_plan import ReplayPlan, ReplayWorkload, plan_replay
from memhier.recsys.plan.table_plan import TablePlan, TableWorkload, plan_tables
from memhier.recsys.plan.zipf import Zipf

__all__ = ["ReplayPlan", "ReplayWorkload", "TablePlan", "TableWorkload", "Zipf", "plan_replay", "plan_tables"]
