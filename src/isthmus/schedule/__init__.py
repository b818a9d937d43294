"""Pipeline schedules as plain data, and their checker; simulator and runtime execute the same schedules."""

from isthmus.schedule.buffers import is_last_use, receive_buffers
from isthmus.schedule.check import check_schedule
from isthmus.schedule.dualpipe import dualpipe
from isthmus.schedule.exchanges import lay_exchanges
from isthmus.schedule.forward_only import forward_only
from isthmus.schedule.generate import SCHEDULES, gpipe, make_schedule, one_f_one_b
from isthmus.schedule.interleaved import interleaved
from isthmus.schedule.operation import Kind, Operation, Schedule
from isthmus.schedule.overlapped import overlapped, warm_up_counts
from isthmus.schedule.zero_bubble import zero_bubble

__all__ = [
    "SCHEDULES",
    "Kind",
    "Operation",
    "Schedule",
    "check_schedule",
    "dualpipe",
    "forward_only",
    "gpipe",
    "interleaved",
    "is_last_use",
    "lay_exchanges",
    "make_schedule",
    "one_f_one_b",
    "overlapped",
    "receive_buffers",
    "warm_up_counts",
    "zero_bubble",
]
