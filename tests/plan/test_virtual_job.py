"""Rules of plans for a job of `compute: virtual`: those of a real one, marked, with all that they predict."""

from __future__ import annotations

import json
from pathlib import Path

from isthmus.core.job import Job
from isthmus.core.model import load_model
from isthmus.core.pool import Pool
from isthmus.plan import make_plans
from tests.plan.test_search import CONFIG, job


def real_chips() -> Pool:
    """Two clusters of two H20 each, joined."""
    group = {"chip": "H20", "nodes": 1, "chips_per_node": 2}
    clusters = [{"name": name, "owner": name, "node_groups": [group]} for name in "ab"]
    link = {"between": ["a", "b"], "bandwidth_gbps": 10, "round_trip_ms": 20}
    return Pool.model_validate({"clusters": clusters, "links": [link]})


def test_a_virtual_job_gets_the_plans_of_a_real_one(tmp_path: Path) -> None:
    """The same plans in the same order, except that they say what they are for."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    model, real = load_model(file), job()
    virtual = Job.model_validate(real.model_dump() | {"compute": "virtual"})
    plans = [make_plans(one, model, real_chips()).plans for one in (real, virtual)]
    assert [one.model_copy(update={"compute": "real"}) for one in plans[1]] == list(plans[0])
    assert {one.compute for one in plans[0]} == {"real"}
    assert {one.compute for one in plans[1]} == {"virtual"}


def test_a_plan_predicts_the_end_of_a_step(tmp_path: Path) -> None:
    """On real chips every stage's time has an update; on paced ones updates are those of the machine."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    for plan in make_plans(job(), load_model(file), real_chips()).plans:
        assert plan.predicted is not None
        assert all(time.update_s > 0 for time in plan.predicted.stage_times)
