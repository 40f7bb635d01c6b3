"""Optimizers: the table of update rules, their state on a rank, and learning-rate schedules.

RULES  all update rules; a new one needs a row there and its operation in `ops`
"""

from mpitrain.optim.optimizer import Optimizer, check_groups, learning_rate
from mpitrain.optim.rules import RULES, without_unread

__all__ = ["RULES", "Optimizer", "check_groups", "learning_rate", "without_unread"]
