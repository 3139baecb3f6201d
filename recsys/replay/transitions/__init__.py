"""Replay of transitions: a ring on SSD, drawn from by priority, with n-step returns and slices of trajectories."""

from memhier.recsys.replay.transitions.batch import TransitionBatch
from memhier.recsys.replay.transitions.buffer import TransitionBuffer
from memhier.recsys.replay.transitions.draws import Prioritised, Uniform
from memhier.recsys.replay.transitions.runs import NStep, Slices
from memhier.recsys.replay.transitions.sum_tree import SumTree

__all__ = ["NStep", "Prioritised", "Slices", "SumTree", "TransitionBatch", "TransitionBuffer", "Uniform"]
