"""Pipeline schedules as pure data, and their checker: read by the simulator and the runtime alike."""

from isthmus.schedule.check import check_schedule
from isthmus.schedule.generate import SCHEDULES, forward_only, gpipe, make_schedule, one_f_one_b
from isthmus.schedule.operation import Kind, Operation, Schedule

__all__ = [
    "SCHEDULES",
    "Kind",
    "Operation",
    "Schedule",
    "check_schedule",
    "forward_only",
    "gpipe",
    "make_schedule",
    "one_f_one_b",
]
