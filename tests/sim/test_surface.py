"""The public surface of `schedule` and `sim`, pinned: changing it is a decision, not an accident."""

import isthmus.schedule
import isthmus.sim


def test_the_surface_of_schedule():
    """Every schedule by name, the checker, and what lays exchanges."""
    assert set(isthmus.schedule.__all__) == {
        "SCHEDULES", "Kind", "Operation", "Schedule", "check_schedule", "dualpipe", "forward_only", "gpipe",
        "interleaved", "is_last_use", "lay_exchanges", "make_schedule", "one_f_one_b", "overlapped",
        "receive_buffers", "warm_up_counts", "zero_bubble",
    }  # fmt: skip
    assert set(isthmus.schedule.SCHEDULES) == {
        "1f1b", "dualpipe", "gpipe", "interleaved", "overlapped", "zero_bubble"
    }  # fmt: skip


def test_the_surface_of_sim():
    """What goes in, `simulate` and its kin, what comes out."""
    assert set(isthmus.sim.__all__) == {
        "Checkpoints", "Failure", "FailureRun", "Flight", "Interference", "LinkRun", "PipelineRun", "Replica",
        "Span", "StageLoad", "StageRun", "Training", "TrainingRun", "Wire", "best_warm_up", "chrome_trace",
        "draw_failures", "run_pipeline", "simulate", "simulate_failures", "timeline_page",
        "wire_of",
    }  # fmt: skip
    assert all(hasattr(isthmus.sim, name) for name in isthmus.sim.__all__)
