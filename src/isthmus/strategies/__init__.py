"""Collectives as plain data: the messages of each strategy, and their checker; runtime and simulator execute them."""

from isthmus.strategies import regions
from isthmus.strategies.check_steps import check_steps
from isthmus.strategies.count_elements import ElementCounts, count_elements, crossing_elements
from isthmus.strategies.group_steps import RANK_STRATEGIES, group_steps
from isthmus.strategies.make_steps import STRATEGIES, Strategy, find_strategy, steps
from isthmus.strategies.plan_steps import plan_steps
from isthmus.strategies.rank_program import Message, ProgramTurn, RankProgram, rank_program
from isthmus.strategies.step import Region, Step
from isthmus.strategies.strategy_steps import AggregatorKind, Phase, StrategySteps
from isthmus.strategies.worker_grid import WorkerGrid

__all__ = [
    "RANK_STRATEGIES",
    "STRATEGIES",
    "AggregatorKind",
    "ElementCounts",
    "Message",
    "Phase",
    "ProgramTurn",
    "RankProgram",
    "Region",
    "Step",
    "Strategy",
    "StrategySteps",
    "WorkerGrid",
    "check_steps",
    "count_elements",
    "crossing_elements",
    "find_strategy",
    "group_steps",
    "plan_steps",
    "rank_program",
    "regions",
    "steps",
]
