"""The `kubernetes` adapter keeps the contract of every adapter, on the stand-in and on a real API server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.agent.adapters.check_adapter import Rule, adapter_rules, check_adapter
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.clusters import RealCluster, StandInCluster

SAMPLE = (
    "environment_has_devices_without_tokens", "starts_at_most_once", "force_sends_sigkill", "limits_are_applied",
    "exit_leaves_no_processes", "starts_at_the_same_time_are_one", "a_hold_spans_nodes", "two_holds_share_no_card",
    "a_waiting_hold_is_granted_when_cards_return", "a_release_may_come_first", "a_worker_ends_with_the_lease",
    "cancelled_while_starting", "a_start_without_scheduler_is_repeated",
)  # fmt: skip
"""Rules of which `make test` tries all on the stand-in: one of each kind."""

REAL_SAMPLE = (
    "own_workers_are_no_foreign_jobs", "holds_at_the_same_time_are_one", "too_large_a_hold_takes_nothing",
    "ranks_start_on_their_nodes", "a_worker_runs_on_without_its_scheduler", "a_restart_changes_the_epoch",
)  # fmt: skip
"""The same on the real API server."""

ALL_RULES = adapter_rules(holds=True, faults=True)


def name_of(rule: Rule) -> str:
    return rule.__name__


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[StandInCluster]:
    cluster = StandInCluster(tmp_path)
    try:
        yield cluster
    finally:
        cluster.end()


@pytest.fixture
def real(tmp_path: Path, api_server: ApiServer) -> Iterator[RealCluster]:
    cluster = RealCluster(tmp_path, api_server)
    try:
        yield cluster
    finally:
        cluster.end()


@pytest.mark.slow
@pytest.mark.parametrize("rule", ALL_RULES, ids=name_of)
def test_the_adapter_keeps_the_rule(rule: Rule, whole: bool, stand_in: StandInCluster, tmp_path: Path) -> None:
    """One rule of `check_adapter`, on the stand-in; a sample of them without `--whole`."""
    if not whole and rule.__name__ not in SAMPLE:
        pytest.skip("one of the rules that --whole tries")
    check_adapter(stand_in.adapter, tmp_path, faults=stand_in, rules=(rule,), timeout_s=60.0)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ALL_RULES, ids=name_of)
def test_the_adapter_keeps_the_rule_on_a_real_server(
    rule: Rule, whole: bool, real: RealCluster, tmp_path: Path
) -> None:
    """The same on a real API server, with the rights of `deploy/kubernetes` and no others."""
    if not whole and rule.__name__ not in REAL_SAMPLE:
        pytest.skip("one of the rules that --whole tries")
    check_adapter(real.adapter, tmp_path, faults=real, rules=(rule,), timeout_s=60.0)
