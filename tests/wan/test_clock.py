"""The event loop's timers, and asking the scheduler for prompt wake-ups."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from isthmus.wan.precise_timing import precise_event_loop, request_prompt_wakeup


@pytest.mark.on_the_clock
@pytest.mark.slow
def test_timers_are_better_than_a_millisecond() -> None:
    """A timer never fires early, and typically less than half a millisecond late."""

    async def lateness_s() -> list[float]:
        late = []
        for delay_s in (0.0003, 0.0012, 0.0051) * 10:
            start_s = time.monotonic()
            await asyncio.sleep(delay_s)
            late.append(time.monotonic() - start_s - delay_s)
        return late

    with asyncio.Runner(loop_factory=precise_event_loop) as runner:
        late = sorted(runner.run(lateness_s()))
    assert late[0] > -1e-4
    assert late[len(late) // 3] < 5e-4


@pytest.mark.slow
def test_asking_to_be_woken_soon_harms_nothing() -> None:
    """Granted or not, with any privilege, the process goes on; it is asked for in one of its own."""
    script = "from isthmus.wan.precise_timing import request_prompt_wakeup as ask; ask(); ask(); print('on')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("on\n", "")


@pytest.mark.parametrize("error", [PermissionError, OSError])
def test_a_machine_without_real_time_priority_is_not_in_the_way(error: type[OSError]) -> None:
    """Whatever forbids it, such as a cgroup without a share of real time; the thread keeps its ordinary priority."""

    def ask() -> int:
        request_prompt_wakeup(Mock(side_effect=error(1, "no")))
        return os.sched_getscheduler(0)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(ask).result() == os.SCHED_OTHER
