"""The `ray` adapter keeps the contract of every adapter on a real Ray, also without its dashboard or its head."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.agent.adapters.check_adapter import Rule, adapter_rules, check_adapter
from isthmus.agent.courier.courier import Courier
from tests.ray.ray_cluster import RayCluster
from tests.ray.samples import adapter_of

SAMPLE = (
    "own_workers_are_no_foreign_jobs", "environment_has_devices_without_tokens", "starts_at_most_once",
    "exit_leaves_no_processes", "arguments_arrive_unchanged", "a_hold_spans_nodes", "holds_at_the_same_time_are_one",
    "too_large_a_hold_takes_nothing", "a_released_id_holds_nothing_again", "a_worker_ends_with_the_lease",
    "ranks_start_on_their_nodes", "cancelled_while_starting", "a_worker_runs_on_without_its_scheduler",
)  # fmt: skip
"""Rules of which `make test` tries all on Ray: one of each kind."""

HEAD_RULES = ("a_restart_changes_the_epoch", "a_hold_survives_or_ends_whole", "a_release_is_not_forgotten")
"""Rules that are tried with the loss of the head, which ends Ray's session; the others with that of its dashboard."""

TIMEOUT_S = 90.0


class DashboardFaults:
    """Puts the dashboard, which answers for Ray, out of reach, and back."""

    def __init__(self, ray: RayCluster) -> None:
        self._ray = ray

    def kill(self) -> None:
        """Break every connection to the dashboard; refuse others."""
        self._ray.cut_dashboard()

    def restart(self) -> None:
        """Let it be reached again."""
        self._ray.mend_dashboard()


class HeadFaults:
    """Kills every process of Ray; what starts again knows nothing of what was before."""

    def __init__(self, ray: RayCluster) -> None:
        self._ray = ray

    def kill(self) -> None:
        """End every process of both nodes at once."""
        self._ray.kill()

    def restart(self) -> None:
        """Start a new session on the same ports."""
        self._ray.start()


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state folder of one agent, whose holder job serves all rules."""
    return tmp_path_factory.mktemp("agent")


@pytest.fixture(scope="module")
def courier(state: Path) -> Iterator[Courier]:
    """The courier of that agent."""
    made = Courier(state)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rule", adapter_rules(holds=True, faults=True), ids=lambda rule: rule.__name__)
def test_the_ray_adapter_keeps_the_rule(
    rule: Rule, whole: bool, ray: RayCluster, courier: Courier, state: Path, tmp_path: Path
) -> None:
    """One rule of `check_adapter`, on nodes of a real cluster; a sample of them without `--whole`."""
    if not whole and rule.__name__ not in SAMPLE:
        pytest.skip("one of the rules that --whole tries")
    faults = HeadFaults(ray) if rule.__name__ in HEAD_RULES else DashboardFaults(ray)
    check_adapter(
        lambda command: adapter_of(ray, state, courier, command),
        tmp_path,
        timeout_s=TIMEOUT_S,
        faults=faults,
        rules=(rule,),
    )
