"""The `slurm` adapter keeps the contract of every adapter on a real Slurm, also when slurmctld is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.agent.adapters.check_adapter import Rule, adapter_rules, check_adapter
from tests.slurm.samples import adapter_of
from tests.slurm.slurm_cluster import SlurmCluster

SAMPLE = (
    "own_workers_are_no_foreign_jobs", "environment_has_devices_without_tokens", "starts_at_most_once",
    "force_sends_sigkill", "exit_leaves_no_processes", "arguments_arrive_unchanged", "a_hold_spans_nodes",
    "holds_at_the_same_time_are_one", "too_large_a_hold_takes_nothing", "a_released_id_holds_nothing_again",
    "a_worker_ends_with_the_lease", "ranks_start_on_their_nodes", "cancelled_while_starting",
    "a_worker_runs_on_without_its_scheduler", "a_release_is_not_forgotten",
)  # fmt: skip
"""Rules of which `make test` tries all on Slurm: one of each kind."""


class ControllerFaults:
    """Kills slurmctld and starts it again."""

    def __init__(self, slurm: SlurmCluster) -> None:
        self._slurm = slurm

    def kill(self) -> None:
        """End slurmctld at once."""
        self._slurm.kill_controller()

    def restart(self) -> None:
        """Start slurmctld from its saved state, and wait until it answers."""
        self._slurm.start_controller()
        self._slurm.wait_answer()
        self._slurm.wait_registered()


@pytest.mark.slow
@pytest.mark.parametrize("rule", adapter_rules(holds=True, faults=True), ids=lambda rule: rule.__name__)
def test_the_slurm_adapter_keeps_the_rule(rule: Rule, whole: bool, alpha: SlurmCluster, tmp_path: Path) -> None:
    """One rule of `check_adapter`, on nodes of a real cluster; a sample of them without `--whole`."""
    if not whole and rule.__name__ not in SAMPLE:
        pytest.skip("one of the rules that --whole tries")
    check_adapter(
        lambda command: adapter_of(alpha, tmp_path / "state", command),
        tmp_path,
        faults=ControllerFaults(alpha),
        rules=(rule,),
    )
