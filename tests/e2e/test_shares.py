"""A job whose stages are shared by two cards each, the whole way with real processes, in one curve."""

from pathlib import Path

import pytest

from isthmus.cli.demo.demo_pool import DemoPool
from tests.e2e.site import all_metrics, as_one_process, choose, make_job, make_model, state_is, submit

pytestmark = pytest.mark.slow


def test_stages_shared_by_two_cards_train_what_one_process_trains(pairs: DemoPool, tmp_path: Path) -> None:
    """Two sites of two cards, tensor parallelism 2 fixed by the job: four workers, one loss, one result."""
    model = make_model(pairs.folder, "two-heads", num_key_value_heads=2)
    fixed = {"parallel": {"tp": 2, "pp": 2}}
    job = make_job(pairs.folder, "shares", steps=12, policy="manual", model=model, **fixed)
    view = submit(pairs.client, job)
    plan = choose(pairs.client, view.id, lambda one: len(one.clusters) == 2)
    assert [(stage.tp, stage.sp) for stage in plan.stages] == [(2, True), (2, True)]
    state_is(pairs.client, view.id, "succeeded")
    metrics = all_metrics(pairs.client, view.id)
    assert {one.rank for one in metrics} == {0, 1, 2, 3}
    assert {one.rank for one in metrics if "loss" in one.values} == {2}, "one rank tells the loss"
    as_one_process(job, metrics, tmp_path)
    assert (Path(job.output) / "model.safetensors.index.json").exists()
