"""Pipeline schedules as plain data, and their checker; simulator and runtime execute the same schedules."""

from isthmus.schedule.add_communication import add_communication
from isthmus.schedule.check_schedule import check_schedule
from isthmus.schedule.dualpipe import dualpipe
from isthmus.schedule.forward_only import forward_only
from isthmus.schedule.interleaved import interleaved
from isthmus.schedule.make_schedule import SCHEDULES, SEARCHED, gpipe, make_schedule, one_f_one_b
from isthmus.schedule.operation import Operation, OperationKind, Schedule
from isthmus.schedule.overlapped import overlapped, warm_up_counts
from isthmus.schedule.peak_receive_buffers import is_last_use, peak_receive_buffers
from isthmus.schedule.searched import (
    Hop,
    PipelineCosts,
    SearchedSchedule,
    StageCosts,
    schedule_of_text,
    search_schedule,
    text_of_schedule,
)
from isthmus.schedule.zero_bubble import zero_bubble

__all__ = [
    "SCHEDULES",
    "SEARCHED",
    "Hop",
    "Operation",
    "OperationKind",
    "PipelineCosts",
    "Schedule",
    "SearchedSchedule",
    "StageCosts",
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
    "schedule_of_text",
    "search_schedule",
    "text_of_schedule",
    "warm_up_counts",
    "zero_bubble",
]
