"""Traces of the pool simulator: what is read from files of others, and what a seed generates."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.control.simulation.traces.generate_trace import generate_trace
from isthmus.control.simulation.traces.job_trace import TraceJob, read_trace
from isthmus.core.errors import InputError

SACCT = """JobID|Account|Submit|Elapsed|NNodes|ReqTRES|QOS
7|vision|2026-03-01T10:00:30|01:00:00|2|billing=64,cpu=64,gres/gpu=16,mem=1T,node=2|high
7.batch|vision|2026-03-01T10:00:30|01:00:00|2||
8|speech|2026-03-01T10:00:00|2-00:00:05|1|cpu=8,gres/gpu:h100=4,node=1|normal
9|speech|2026-03-01T10:05:00|00:10:00|1|cpu=8,node=1|normal
10|speech|2026-03-01T10:06:00|00:00:00|1|cpu=8,gres/gpu=1,node=1|normal
"""
ALIBABA = """job_name,organization,gpu_model,cpu_request,gpu_request,worker_num,submit_time,duration,job_type
a,13,A10,20,1,1,50,2764,HP
b,57,A100-SXM4-80GB,15,8,16,40,41060,Spot
c,57,A10,15,0,1,41,10,Spot
"""


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text)
    return path


def test_slurm_accounting_is_read_by_job(tmp_path: Path) -> None:
    """Times count from the first submission; steps, jobs without chips, jobs that never ran are left out."""
    trace = read_trace(_file(tmp_path, SACCT))
    assert trace.jobs == (
        TraceJob(name="8", owner="speech", submit_s=0, run_s=172805, chips_per_worker=4, chip="h100"),
        TraceJob(name="7", owner="vision", submit_s=30, run_s=3600, workers=2, chips_per_worker=8, priority="high"),
    )
    assert trace.skipped == {"steps of a job": 1, "no chips asked for": 1, "never ran": 1}


def test_an_alibaba_trace_is_read_with_its_organisations(tmp_path: Path) -> None:
    """Organisations are owners, spot jobs of low priority, workers a gang; `limit` takes the first."""
    trace = read_trace(_file(tmp_path, ALIBABA))
    assert [(j.name, j.owner, j.submit_s, j.chips, j.priority) for j in trace.jobs] == [
        ("b", "57", 0.0, 128, "low"),
        ("a", "13", 10.0, 1, "high"),
    ]
    assert trace.owners == ("13", "57")
    assert len(read_trace(_file(tmp_path, ALIBABA), limit=1).jobs) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b\n1,2\n", "no column job_name"),
        ("JobID|Account\n1|x\n", "no column Submit"),
        (SACCT.replace("01:00:00", "an hour"), "line 2: 'an hour' is not an elapsed time"),
        (ALIBABA.replace("2764", "long"), "line 2"),
        (ALIBABA.replace("2764", "nan"), "line 2: 'nan' is not a finite number"),
        (ALIBABA.replace(",16,", ",inf,"), "line 3: 'inf' is not a finite number"),
        (ALIBABA.replace("A10", "x" * 200_000), "cannot be read: field larger"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    """Missing columns and values that are no numbers are named."""
    with pytest.raises(InputError, match=says):
        read_trace(_file(tmp_path, text))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """No file, no trace."""
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(tmp_path / "none")


def test_a_seed_gives_the_same_trace_with_about_the_load_asked_for() -> None:
    """Generated traces repeat, and over many jobs ask for about the part of the chips that was asked for."""
    chips = {"east": 512, "west": 256, "north": 256}
    trace = generate_trace(chips, seed=3, num_jobs=20_000, load=0.8)
    assert trace == generate_trace(chips, seed=3, num_jobs=20_000, load=0.8)
    asked = sum(job.chips * job.run_s for job in trace.jobs)
    assert asked / (trace.jobs[-1].submit_s * 1024) == pytest.approx(0.8, rel=0.1)
    assert max(job.chips for job in trace.jobs) <= 512
    share = sum(job.owner == "east" for job in trace.jobs) / len(trace.jobs)
    assert share == pytest.approx(0.5, abs=0.02)
