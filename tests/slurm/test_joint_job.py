"""One job trains over two Slurm clusters at once, with a real server and agents; a Slurm user's own job preempts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.agent.adapters.local_adapter import WORKER_COMMAND
from isthmus.client.api_client import ApiClient
from isthmus.train.checkpoint.checkpoint_folder import newest_valid
from tests.control.processes import until
from tests.e2e.site import all_metrics, as_one_process, state_is
from tests.slurm.conftest import require_slurm
from tests.slurm.joint_pool import JointPool
from tests.slurm.slurm_cluster import SlurmCluster, slurm_clusters

pytestmark = pytest.mark.slow


def test_a_job_over_two_slurms_is_preempted_by_a_users_job_and_goes_on(whole: bool, tmp_path: Path) -> None:
    """1. A rank trains in each cluster. 2. A user's job at one of them takes the card by Slurm's own rules: the job
    leaves both. 3. The user's job ends, and the job goes on from its checkpoint. 4. Its losses are one process's.
    """
    require_slurm()
    if not whole:
        pytest.skip("four minutes: --whole tries it; tests/slurm/test_slurm_agent.py is the short form")
    steps = 120
    with slurm_clusters(tmp_path, 1, 1, "east", "west") as slurms:
        (tmp_path / "pool").mkdir()
        pool = JointPool(tmp_path / "pool", slurms, WORKER_COMMAND)
        try:
            until(lambda: pool.free() == {"east": 1, "west": 1}, "both sites have joined", 60)
            job = pool.joint_job("patient", steps=steps, every_steps=4)
            with ApiClient(pool.url, pool.user) as client:
                patient = pool.submit_joint(job)
                until(lambda: newest_valid(Path(job.checkpoints.folder)), "a checkpoint is whole", 240)
                assert [slurm.num_held() for slurm in slurms.values()] == [1, 1]
                users = take_the_card(slurms["west"])
                state_is(client, patient, "waiting")
                until(lambda: slurms["east"].num_held() == 0, "the other site has its card back", 60)
                slurms["west"].run("scancel", users)
                view = state_is(client, patient, "succeeded")
                metrics = all_metrics(client, patient)
            assert view.attempt > 1
            assert min(one.step for one in metrics if one.attempt > 1) >= 4, "restored, not begun again"
            as_one_process(job, metrics, tmp_path / "alone", within=1e-6)
        finally:
            for site in slurms:
                pool.end(site)
            pool.close()


def take_the_card(slurm: SlurmCluster) -> str:
    """Submit a user's job to the partition that preempts, and wait until it runs; return its id."""
    script = ("--partition=high", "--gpus=1", "--wrap", "sleep 1000", "-o", "/dev/null")
    users = slurm.run("sbatch", "--parsable", *script).strip()
    until(lambda: slurm.run("squeue", "-h", "-j", users, "-o", "%t").strip() == "R", "the user's job runs", 90)
    return users
