"""`check_python`: whether the head's Python can run the holder: a job that ends at once says so, and is removed."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator

from isthmus.agent.adapters.ray.forget_job import forget_job
from isthmus.agent.adapters.ray.job_trouble import job_trouble, trouble_hint
from isthmus.agent.adapters.ray.ray_rest import RayRest
from isthmus.agent.adapters.scheduler_adapter import SchedulerCheck
from isthmus.core.errors import IsthmusError, UnavailableError

LIMIT_S = 60.0
"""Ray takes 2 s to start a job, on a busy machine ten times as long."""
POLL_S = 0.5
PROGRAM = (
    "import sys; sys.exit('needs Python 3.11 or later, is ' + sys.version.split()[0]) "
    "if sys.version_info < (3, 11) else __import__('ray')"
)
_PLACE = ("options", "python")


def check_python(
    rest: RayRest,
    python: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> Iterator[SchedulerCheck]:
    """Yield whether `python`, as the head calls it, is recent enough and has Ray; nothing where Ray does not answer."""
    job_id, end_s = f"isthmus-check-{uuid.uuid4().hex}", clock() + LIMIT_S
    try:
        rest.submit(job_id, f'{python} -c "{PROGRAM}"')
        while (job := rest.job(job_id)) is not None and not job.has_ended and clock() < end_s:
            pause(POLL_S)
    except UnavailableError as error:
        _remove(rest, job_id, pause)
        yield SchedulerCheck(
            check="python", ok=False, detail=f"no job can be tried: {error.message}", hint=error.hint or ""
        )
        return
    _remove(rest, job_id, pause)
    if job is not None and job.status == "SUCCEEDED":
        yield SchedulerCheck(check="python", ok=True, detail=f"'{python}' at Ray's head runs and has Ray")
        return
    late = job is not None and not job.has_ended
    detail = f"a job is {job.status} after {LIMIT_S:g} s" if job is not None and late else job_trouble(job)
    hint = "free a CPU of Ray's head, or see its dashboard" if late else trouble_hint(detail)
    place = () if late else _PLACE
    yield SchedulerCheck(check="python", ok=False, detail=f"'{python}': {detail}", hint=hint, file_path=place)


def _remove(rest: RayRest, job_id: str, pause: Callable[[float], object]) -> None:
    """Stop and remove the job, whatever became of it; what Ray does not answer stays in its list."""
    with contextlib.suppress(IsthmusError):
        rest.stop(job_id)
    with contextlib.suppress(IsthmusError):
        forget_job(rest, job_id, pause)
