"""Collectives as plain data: the messages of each strategy, and their checker; runtime and simulator execute them."""

from isthmus.strategies import regions
from isthmus.strategies.check_steps import check_steps, crossing_elements
from isthmus.strategies.plan_steps import plan_steps
from isthmus.strategies.rank_program import Message, ProgramTurn, RankProgram, rank_program
from isthmus.strategies.step import Region, Step

__all__ = [
    "Message",
    "ProgramTurn",
    "RankProgram",
    "Region",
    "Step",
    "check_steps",
    "crossing_elements",
    "plan_steps",
    "rank_program",
    "regions",
]
