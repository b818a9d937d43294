"""Pipeline schedules as plain data, and their checker; simulator and runtime execute the same schedules."""

from isthmus.schedule.add_communication import add_communication
from isthmus.schedule.check_schedule import check_schedule
from isthmus.schedule.dualpipe import dualpipe
from isthmus.schedule.forward_only import forward_only
from isthmus.schedule.interleaved import interleaved
from isthmus.schedule.make_schedule import SCHEDULES, gpipe, make_schedule, one_f_one_b
from isthmus.schedule.operation import Operation, OperationKind, Schedule
from isthmus.schedule.overlapped import overlapped, warm_up_counts
from isthmus.schedule.peak_receive_buffers import is_last_use, peak_receive_buffers
from isthmus.schedule.zero_bubble import zero_bubble

__all__ = [
    "SCHEDULES",
    "Operation",
    "OperationKind",
    "Schedule",
    "add_communication",
    "check_schedule",
    "dualpipe",
    "forward_only",
    "gpipe",
    "interleaved",
    "is_last_use",
    "make_schedule",
    "one_f_one_b",
    "overlapped",
    "peak_receive_buffers",
    "warm_up_counts",
    "zero_bubble",
]
