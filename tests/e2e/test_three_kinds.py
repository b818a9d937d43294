"""One job trains over Slurm, Ray and a local site at once; a Slurm user's own job preempts it; its losses stay."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.agent.adapters.local_adapter import WORKER_COMMAND
from isthmus.agent.containers.image_tool import build_image
from isthmus.client.api_client import ApiClient
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.train.checkpoint.checkpoint_folder import newest_valid
from tests.agent.test_containers import HOST, why_not
from tests.control.processes import until
from tests.e2e.site import all_metrics, as_one_process, state_is
from tests.ray.ray_cluster import RayCluster, missing_ray
from tests.slurm.conftest import require_slurm
from tests.slurm.joint_pool import JointPool, local_site, ray_site
from tests.slurm.slurm_cluster import slurm_clusters
from tests.slurm.test_joint_job import take_the_card

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

STEPS = 90


@pytest.fixture
def ray(whole: bool) -> Iterator[RayCluster]:
    """Two nodes with one card each, of which the pool has one."""
    require_slurm()
    if missing_ray():
        pytest.skip(f"needs Ray: {missing_ray()}")
    if not whole:
        pytest.skip("minutes: --whole tries it")
    cluster = RayCluster(Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp")), cards=1)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()


def test_a_job_over_slurm_ray_and_local_is_preempted_by_a_slurm_users_job_and_goes_on(
    ray: RayCluster, tmp_path: Path
) -> None:
    """1. Ranks train at each site, each started by its own scheduler in a container of its rendered image, where root
    may: at Slurm inside its step, at Ray inside its task, from the images of Ray's nodes. 2. A Slurm user's job takes
    the card there by Slurm's own rules: the job leaves all sites. 3. It goes on from its checkpoint. 4. Its losses are
    one process's.
    """
    with slurm_clusters(tmp_path, 1, 1, "west") as slurms:
        (tmp_path / "pool").mkdir()
        policy, nodes = policy_with_images(tmp_path)
        others = {"north": ray_site(ray, policy, nodes), "south": local_site(policy)}
        pool = JointPool(tmp_path / "pool", slurms, WORKER_COMMAND, others=others, policy=policy)
        try:
            until(lambda: pool.free() == {"west": 1, "north": 2, "south": 1}, "all sites have joined", 300)
            job = pool.joint_job("patient", steps=STEPS, every_steps=4)
            with ApiClient(pool.url, pool.user) as client:
                patient = pool.submit_joint(job)
                until(lambda: newest_valid(Path(job.checkpoints.folder)), "a checkpoint is whole", 600)
                assert (slurms["west"].num_held(), ray.used_cards()) == (1, 2)
                if policy.workers.containers is not None:
                    known = {"north": Path(nodes["image_store"]) / "runtime"}
                    known |= {name: pool.folder / name / "containers" for name in ("west", "south")}
                    assert {name: len(list(one.iterdir())) for name, one in known.items()} == {
                        "west": 1, "south": 1, "north": 2
                    }  # fmt: skip
                users = take_the_card(slurms["west"])
                state_is(client, patient, "waiting", timeout_s=600)
                until(lambda: not ray.used_cards(), "Ray has its cards back", 120)
                slurms["west"].run("scancel", users)
                view = state_is(client, patient, "succeeded", timeout_s=1200)
                metrics = all_metrics(client, patient)
            assert view.attempt > 1
            assert {one.cluster for one in metrics if one.values.get("loss") is not None} <= pool.sites.keys()
            assert min(one.step for one in metrics if one.attempt > 1) >= 4, "restored, not begun again"
            as_one_process(job, metrics, tmp_path / "alone", within=1e-6)
        finally:
            for name in pool.sites:
                pool.end(name)
            pool.close()


def policy_with_images(folder: Path) -> tuple[OwnerPolicy, dict[str, str]]:
    """Return a policy whose workers run in containers, and Ray's options of the images at its nodes.

    Where this machine cannot run containers neither names images.
    """
    if why_not():
        return OwnerPolicy(), {}
    folder.chmod(0o755)
    build_image(folder / "images", "host", "1", HOST)
    (folder / "ray-nodes").mkdir()
    shutil.copytree(folder / "images", folder / "ray-nodes" / "images")
    options = {"images": str(folder / "ray-nodes" / "images"), "image_store": str(folder / "ray-nodes" / "store")}
    return OwnerPolicy.model_validate({"workers": {"containers": {"images": str(folder / "images")}}}), options
