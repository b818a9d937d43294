"""Reinforcement learning: the policy loss and its parts, the ledger of trajectories, and jobs of task rl."""

from isthmus.rl.advantages import advantages
from isthmus.rl.correction import correction
from isthmus.rl.k3_penalty import k3_penalty
from isthmus.rl.ledger.check_trajectories import check_trajectories
from isthmus.rl.ledger.ledger_records import LedgerConfig
from isthmus.rl.ledger.ledger_summary import LedgerSummary, summarise_ledger
from isthmus.rl.ledger.trajectory_ledger import TrajectoryLedger
from isthmus.rl.overlong_penalty import overlong_penalty
from isthmus.rl.policy_loss import policy_loss

__all__ = [
    "LedgerConfig",
    "LedgerSummary",
    "TrajectoryLedger",
    "advantages",
    "check_trajectories",
    "correction",
    "k3_penalty",
    "overlong_penalty",
    "policy_loss",
    "summarise_ledger",
]
