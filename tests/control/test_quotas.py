"""What a user or an owner may ask of a server: each limit, the last value within it, and the words beyond it."""

from __future__ import annotations

import pytest

from isthmus.control.queries.quotas import Quotas, check_cluster_quota, check_live_jobs, check_submission
from isthmus.control.state.packed_submission import PackedSubmission
from isthmus.core.errors import AuthError, QuotaError, TooLargeError
from tests.control.driver import Driver
from tests.control.samples import cluster, plan, submission


def test_high_priority_is_for_users_that_have_it() -> None:
    """It may preempt others; the lower ones need nothing."""
    quotas = Quotas(high_priority_users=frozenset({"ann"}))
    check_submission(quotas, "ann", submission(priority="high"))
    check_submission(quotas, "bob", submission(priority="middle"))
    with pytest.raises(AuthError) as raised:
        check_submission(quotas, "bob", submission(priority="high"))
    assert str(raised.value) == (
        "user 'bob' may not submit jobs of priority 'high', which may preempt those of others "
        "(use priority 'middle', or ask the pool operator: isthmus token grant, serve --high-priority-user)"
    )


def test_a_job_is_as_large_as_it_is_stored() -> None:
    """With the config of its model; the last byte still fits."""
    packed = PackedSubmission.pack(submission("long"))
    size = len(packed.job_json) + len(packed.model_json)
    check_submission(Quotas(job_bytes=size), "ann", submission("long"))
    with pytest.raises(TooLargeError) as raised:
        check_submission(Quotas(job_bytes=size - 1), "ann", submission("long"))
    assert str(raised.value) == (
        f"job 'long' takes {size:,} bytes with its model's config, at most {size - 1:,} are accepted "
        "(name folders or globs in data.paths instead of single files; the operator sets --max-job-kib)"
    )


def test_a_user_has_a_number_of_jobs_that_have_not_ended() -> None:
    """Those of others, and ended ones, do not count."""
    pool = Driver("a")
    state, quotas = pool.coordinator.state, Quotas(live_jobs_per_user=1)
    pool.submit("i", plan("a"), user="bob")
    check_live_jobs(quotas, state, "ann")
    pool.submit("j", plan("a"), user="ann")
    with pytest.raises(QuotaError) as raised:
        check_live_jobs(quotas, state, "ann")
    assert str(raised.value) == (
        "user 'ann' has 1 jobs that have not ended, at most 1 are accepted "
        "(wait until some have ended, or cancel some; the operator sets --max-jobs-per-user)"
    )
    check_live_jobs(Quotas(live_jobs_per_user=2), state, "ann")
    pool.cancel("j")
    pool.obey()
    check_live_jobs(quotas, state, "ann")


def test_an_owner_has_a_number_of_clusters() -> None:
    """One that has joined reports on; another owner's do not count."""
    pool = Driver("a", "b")
    state, quotas = pool.coordinator.state, Quotas(clusters_per_owner=1)
    check_cluster_quota(quotas, state, cluster("a"))
    check_cluster_quota(quotas, state, cluster("c"))
    other = cluster("c").model_copy(update={"owner": "owner-a"})
    check_cluster_quota(Quotas(clusters_per_owner=2), state, other)
    with pytest.raises(QuotaError) as raised:
        check_cluster_quota(quotas, state, other)
    assert str(raised.value) == (
        "owner 'owner-a' has 1 clusters, at most 1 are accepted: 'c' cannot join "
        "(the operator adds it to the server's pool file, or sets --max-clusters-per-owner)"
    )
