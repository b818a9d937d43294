"""Joint preemption with real processes: server, three agents, emulated links, workers that train."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.cli.demo.demo_pool import DemoPool
from isthmus.train.checkpoint.checkpoint_folder import newest_valid
from tests.e2e.site import (
    all_metrics,
    as_one_process,
    at_step,
    choose,
    make_job,
    make_model,
    state_is,
    submit,
    wait_until,
)

pytestmark = pytest.mark.slow

STEPS = 150


def test_a_job_is_preempted_at_all_owners_and_goes_on_later_with_the_same_losses(
    three: DemoPool, tmp_path: Path
) -> None:
    """A victim is ended once it is safe, at all owners, and trains on as if nothing had happened.

    1. `urgent` is planned for two owners, and `tolerate_silence` trains at all three. 2. The user of `urgent` chooses
    its plan: blocked, an offer names the victim. 3. Its user agrees: a checkpoint is taken and verified, and
    `tolerate_silence` leaves all three owners.
    4. `urgent` trains to its end. 5. `tolerate_silence` goes on from that very step; its losses are one process's.
    """
    client = three.client
    urgent_job = make_job(
        three.folder, "urgent", steps=10, model=make_model(three.folder, "small", num_hidden_layers=2),
        priority="high", policy="manual", placement={"clusters": ["north", "south"]}, parallel={"pp": 2},
    )  # fmt: skip
    urgent = submit(client, urgent_job).id
    state_is(client, urgent, "choosing")
    patient_job = make_job(three.folder, "patient", steps=STEPS, every_steps=0, priority="low")
    patient = submit(client, patient_job).id
    at_step(client, patient, 5)
    choose(client, urgent)
    state_is(client, urgent, "blocked")
    offered = wait_until("its sites have checked its files", lambda: client.job(urgent).offer)
    assert {(victim.job, victim.cluster) for victim in offered} == {(patient, "north"), (patient, "south")}

    client.preempt(urgent, offered)
    state_is(client, urgent, "starting", "running", "stopping", "succeeded")
    saved = newest_valid(Path(patient_job.checkpoints.folder))
    assert saved is not None, "nobody is ended before its work is verified"
    first = {m.step for m in all_metrics(client, patient) if m.attempt == 1}
    assert max(first) < STEPS - 1
    state_is(client, urgent, "succeeded")

    view = state_is(client, patient, "succeeded")
    assert (view.attempt > 1, view.restarts) == (True, 0), "to be preempted is no failure"
    metrics = all_metrics(client, patient)
    assert min(m.step for m in metrics if m.attempt > 1) == saved.step
    as_one_process(patient_job, metrics, tmp_path)
