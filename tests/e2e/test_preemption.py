"""Joint preemption with real processes: server, three agents, emulated links, workers that train."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.cli.demo_site import DemoPool
from isthmus.train.checkpoint.folder import newest
from tests.e2e.site import (
    CONFIG,
    all_metrics,
    losses,
    make_folder,
    make_job,
    submit,
    train_alone,
    wait_until,
)

pytestmark = pytest.mark.slow

STEPS = 150


@pytest.fixture
def site(tmp_path: Path) -> Iterator[DemoPool]:
    """A pool of three owners with one card each."""
    with DemoPool(tmp_path, make_folder(tmp_path)) as pool:
        yield pool


def state_is(site: DemoPool, job: str, *states: str) -> None:
    """Wait until a job is in one of the states."""

    def condition() -> bool:
        view = site.client.job(job)
        assert view.state != "failed", view.reason
        return view.state in states

    wait_until(f"{job} is {' or '.join(states)}", condition)


def test_a_job_is_preempted_at_all_owners_and_goes_on_later_with_the_same_losses(site: DemoPool) -> None:
    """A victim is ended once it is safe, at all owners, and trains on as if nothing had happened.

    1. `patient` trains at three owners. 2. `urgent` wants two of them: blocked, an offer names the victim.
    3. Its user agrees: a checkpoint is taken and verified, and `patient` leaves all three owners.
    4. `urgent` trains to its end. 5. `patient` goes on from that very step; its losses are one process's.
    """
    patient_job = make_job(site.folder, "patient", steps=STEPS, every_steps=0, priority="low")
    patient = submit(site.client, patient_job).id
    wait_until("patient trains", lambda: any(m.step >= 5 for m in all_metrics(site.client, patient)))

    small = site.folder / "small"
    small.mkdir()
    (small / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 2}))
    placement = {"clusters": ["north", "south"]}
    urgent_job = make_job(
        site.folder, "urgent", steps=10, model=str(small), priority="high", policy="manual",
        placement=placement, parallel={"pp": 2},
    )  # fmt: skip
    urgent = submit(site.client, urgent_job).id
    wait_until("plans for urgent", lambda: site.client.plans(urgent).plans)
    site.client.choose(urgent, site.client.plans(urgent).plans[0].id)
    state_is(site, urgent, "blocked")
    offered = site.client.job(urgent).offer
    assert {(victim.job, victim.cluster) for victim in offered} == {(patient, "north"), (patient, "south")}

    site.client.preempt(urgent, offered)
    state_is(site, urgent, "starting", "running", "stopping", "succeeded")
    saved = newest(Path(patient_job.checkpoints.folder))
    assert saved is not None, "nobody is ended before its work is verified"
    first = {m.step for m in all_metrics(site.client, patient) if m.attempt == 1}
    assert max(first) < STEPS - 1
    state_is(site, urgent, "succeeded")

    state_is(site, patient, "succeeded")
    view = site.client.job(patient)
    assert (view.attempt > 1, view.restarts) == (True, 0), "to be preempted is no failure"
    second = {m.step for m in all_metrics(site.client, patient) if m.attempt > 1}
    assert min(second) == saved.step
    together = losses(all_metrics(site.client, patient))
    alone = train_alone(make_job(site.folder, "alone", steps=STEPS), site.folder / "alone" / "worker")
    assert together.keys() == alone.keys() == set(range(STEPS))
    assert max(abs(together[step] - alone[step]) / alone[step] for step in alone) < 1e-4
