"""Sums in the network: a switch that adds integers in slots, its packets, and a worker's side of both."""

from isthmus.core.messages.switch_keys import job_number
from isthmus.switch.fixed_point import FixedPoint, NonFiniteError, magnitude_bits
from isthmus.switch.job_keys import DerivedJobKeys, read_job_keys
from isthmus.switch.packet import MAX_INTEGERS, MAX_WORKERS
from isthmus.switch.passing_worker import (
    Actions,
    Begin,
    FromSwitch,
    FromWorker,
    Lost,
    PassingPhase,
    PassingWorker,
)
from isthmus.switch.run_client import run_client
from isthmus.switch.serve_switch import serve_switch
from isthmus.switch.slot_pool import SlotPool
from isthmus.switch.switch_client import (
    Abort,
    ClientState,
    Instructions,
    Received,
    Start,
    StreamSettings,
    SwitchClient,
    Timer,
)

__all__ = [
    "MAX_INTEGERS",
    "MAX_WORKERS",
    "Abort",
    "Actions",
    "Begin",
    "ClientState",
    "DerivedJobKeys",
    "FixedPoint",
    "FromSwitch",
    "FromWorker",
    "Instructions",
    "Lost",
    "NonFiniteError",
    "PassingPhase",
    "PassingWorker",
    "Received",
    "SlotPool",
    "Start",
    "StreamSettings",
    "SwitchClient",
    "Timer",
    "job_number",
    "magnitude_bits",
    "read_job_keys",
    "run_client",
    "serve_switch",
]
