"""Jobs that name entries of the catalogue: sites bring the versions first, holding no chips; then they start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.placement import PlanRequest
from isthmus.control.placement.propose_plans import propose_plans
from isthmus.control.queries.catalogue.bring_forecast import site_fetches
from isthmus.control.queries.catalogue.catalogue_versions import list_entries
from isthmus.control.queries.dry_run import dry_run_requests
from isthmus.control.queries.explain_wait import answer_query, query_job
from isthmus.control.queries.settle_submission import settle_submission
from isthmus.control.state.events import (
    AgentLost,
    JobSubmitted,
    PoolSet,
    PreemptionAgreed,
    VersionAdded,
    VersionRemoved,
    VictimNamed,
)
from isthmus.core.catalogue import CopyKey, FileManifest, HeldCopy
from isthmus.core.errors import ConflictError
from isthmus.core.messages.site_fetch import SiteFetch
from isthmus.core.model import load_model
from isthmus.core.plan import Plan
from isthmus.core.pool import Link
from tests.control.catalogued import held, manifest
from tests.control.driver import Driver
from tests.control.samples import plan, submission
from tests.control.serving import POOL, job
from tests.control.test_planner import CONFIG, FREE

WIKI = FileManifest.model_validate({"files": [{"path": "a", "num_bytes": 10**10, "sha256": "0" * 64}]})
TINY = manifest({"config.json": b"{}" * 500})


def catalogued(*sites: str) -> Driver:
    """A pool whose sites bring versions, with a data set of 10 GB and a model of user `u`."""
    pool = Driver(*sites)
    for kind, name, of in (("data", "wiki", WIKI), ("model", "tiny", TINY)):
        event = {"now_s": 1.0, "entry_kind": kind, "owner": "u", "name": name, "source": "https://h/x", "manifest": of}
        pool.tell(VersionAdded.model_validate(event))
    for site in sites:
        bring(pool, site)
    return pool


def bring(pool: Driver, site: str, *copies: HeldCopy) -> None:
    """Report the copies of a site."""
    pool.copies[site] = copies
    pool.obey(site)


def submit(pool: Driver, *plans: Plan, job_id: str = "j", **more: object) -> None:
    """Submit a job on the data set, and answer for the planner."""
    wish = submission(job_id, **{"data": {"paths": ["catalogue:wiki"]}} | more)  # type: ignore[arg-type]
    settled = settle_submission(pool.coordinator.state, "u", wish, job_id)
    pool.tell(JobSubmitted(now_s=pool.now_s, job_id=job_id, user="u", submission=settled))
    pool.answer(job_id, *plans)


def test_a_job_starts_once_every_site_has_what_it_needs_there() -> None:
    """1. Its parts are queued, and their orders name the versions. 2. One site has them. 3. So has the other.

    Meanwhile it holds no chips, and another job may have them.
    """
    pool = catalogued("a", "b")
    submit(pool, plan("a", "b"), model="catalogue:tiny")
    (order,) = pool.coordinator.orders("a")
    assert order.desired == "queued"
    assert {(one.kind, one.name, one.num_bytes) for one in order.versions} == {
        ("model", "tiny", 1000),
        ("data", "wiki", 10**10),
    }
    assert pool.reason("j").startswith("waits for its model and data: brings 9.3 GiB to a")
    bring(pool, "a", held("u", WIKI), held("u", TINY))
    assert pool.state("j") == "waiting"
    assert pool.reason("j").startswith("waits for its model and data: brings 9.3 GiB to b")
    assert pool.coordinator.state.clusters["a"].allocated_chips == {}
    bring(pool, "b", held("u", WIKI, complete=False), held("u", TINY))
    assert "brings 4.7 GiB to b" in pool.reason("j")
    bring(pool, "b", held("u", WIKI), held("u", TINY))
    pool.obey("a", "b")
    pool.obey("a", "b")
    assert pool.state("j") == "running"
    kinds = [one.kind for one in pool.coordinator.state.jobs["j"].history.entries]
    assert kinds[:2] == ["submitted", "planned"]
    assert kinds.count("brought") == 1
    replayed = Coordinator.replay(pool.log, pool.coordinator.state.config)
    assert replayed.state.jobs["j"].state == "running"
    assert replayed.state.clusters["a"].copies == pool.coordinator.state.clusters["a"].copies


def test_data_is_brought_only_where_it_is_read() -> None:
    """By the sites of first and last stages; the model goes to all."""
    pool = catalogued("a", "b", "c")
    submit(pool, plan("a", "b", "c"), model="catalogue:tiny")
    needs = {site: [one.name for one in pool.coordinator.orders(site)[0].versions] for site in "abc"}
    assert needs == {"a": ["tiny", "wiki"], "b": ["tiny"], "c": ["tiny", "wiki"]}


def test_a_site_with_copies_starts_a_job_at_once() -> None:
    """A second job on the same data waits for nothing."""
    pool = catalogued("a")
    bring(pool, "a", held("u", WIKI))
    submit(pool, plan("a"))
    assert pool.state("j") == "preparing"


def test_other_jobs_run_while_a_site_brings() -> None:
    """The chips that the first job needs are neither held nor reserved for it until it could use them."""
    pool = catalogued("a")
    submit(pool, plan("a", "a", "a", "a"))
    pool.submit("other", plan("a", "a", "a", "a", name="q"))
    pool.obey("a")
    pool.obey("a")
    assert (pool.state("j"), pool.state("other")) == ("waiting", "running")


def test_a_site_that_cannot_bring_is_left_for_another() -> None:
    """Its problem is the reason; without another plan the job is planned without the site, and fails if that is all."""
    pool = catalogued("a", "b")
    submit(pool, plan("a", name="p"), plan("b", name="q"))
    bring(pool, "a", held("u", WIKI, complete=False, problem="https://h/x/a answered 404"))
    view = pool.coordinator.job_view("j")
    assert view.plan is not None
    assert view.plan.id == "q"
    assert "a: https://h/x/a answered 404" in pool.reason("j")
    bring(pool, "b", held("u", WIKI, complete=False, problem="the cache is full"))
    assert pool.state("j") == "failed"
    assert "b: the cache is full" in pool.reason("j")


def test_a_site_whose_agent_brings_nothing_is_no_candidate() -> None:
    """An agent of an older release reports no copies: the job is not planned there."""
    pool = catalogued("a", "b")
    pool.copies.pop("b")
    pool.obey("b")
    wish = settle_submission(pool.coordinator.state, "u", submission(data={"paths": ["catalogue:wiki"]}), "j")
    pool.tell(JobSubmitted(now_s=1.0, job_id="j", user="u", submission=wish))
    assert set(pool.asked["j"].free_chips) == {"a"}
    now, idle = dry_run_requests(pool.coordinator.state, "u", wish)
    assert (set(now.free_chips), set(idle.free_chips)) == ({"a"}, {"a"})


def test_what_sites_lack_goes_to_the_planner_with_their_rates() -> None:
    """Measured, else the fastest link to the site, else an assumption; sites with copies are left out."""
    pool = catalogued("a", "b", "c", "d")
    link = Link(source="a", target="b", bandwidth_gbps=8, delay_ms=1)
    pool.tell(PoolSet(now_s=1.0, links=(link, link.model_copy(update={"bandwidth_gbps": 4.0, "source": "c"}))))
    pool.fetch_gbps["c"] = 2.5
    bring(pool, "c", held("u", WIKI, complete=False))
    bring(pool, "d", held("u", WIKI), held("u", TINY))
    submit_only = settle_submission(
        pool.coordinator.state, "u", submission(data={"paths": ["catalogue:wiki"]}, model="catalogue:tiny"), "j"
    )
    pool.tell(JobSubmitted(now_s=1.0, job_id="j", user="u", submission=submit_only))
    assert pool.asked["j"].fetches == {
        "a": SiteFetch(model_bytes=1000, data_bytes=10**10, gbps=1.0, link_gbps=1.0),
        "b": SiteFetch(model_bytes=1000, data_bytes=10**10, gbps=8.0, link_gbps=8.0),
        "c": SiteFetch(model_bytes=1000, data_bytes=5 * 10**9, gbps=2.5, measured=True),
    }


def test_the_expected_start_counts_what_is_still_to_come() -> None:
    """10 GB at 1 Gbit/s are 80 s, although the chips are free."""
    pool = catalogued("a")
    submit(pool, plan("a"))
    state = pool.coordinator.state
    (status,) = answer_query(query_job(state, state.jobs["j"], 1000.0, {}, "u"))
    assert status.start_s == pytest.approx(1080.0)
    assert status.reason.startswith("waits for its model and data: brings 9.3 GiB to a, about 1 min 20 s")
    assert any("brings 9.3 GiB to a" in note for note in status.notes)


def test_a_job_takes_no_chips_of_others_before_its_files_are_there() -> None:
    """It is offered no victims, and named ones are refused."""
    pool = catalogued("a")
    pool.submit("other", plan("a", "a", "a", "a", name="q"), priority="low")
    pool.obey("a")
    pool.obey("a")
    submit(pool, plan("a"), priority="middle")
    assert pool.coordinator.job_view("j").offer == ()
    taking = PreemptionAgreed(now_s=1.0, job_id="j", victims=(VictimNamed(cluster="a", job="other", attempt=1),))
    with pytest.raises(ConflictError, match="must bring its model and data first"):
        pool.coordinator.admit(taking)


def test_an_entry_shows_at_which_sites_its_versions_are() -> None:
    """A whole copy, a part with what is wrong, at a site in contact or not; a site that has nothing is left out."""
    pool = catalogued("a", "b", "c")
    bring(pool, "a", held("u", WIKI))
    bring(pool, "b", held("u", WIKI, complete=False, problem="disk is full"))
    pool.tell(AgentLost(now_s=pool.now_s, cluster="a"))
    (entry,) = list_entries(pool.coordinator.state, "u", "data")
    assert [tuple(one.model_dump().values()) for one in entry.versions[0].copies] == [
        ("a", False, 10**10, True, ""),
        ("b", True, 5 * 10**9, False, "disk is full"),
    ]


def test_a_removed_version_is_brought_nowhere() -> None:
    """A site that has all of it lacks nothing; neither does any once it is gone from the catalogue."""
    pool = catalogued("a", "b")
    submit(pool, plan("a", "b"))
    versions = pool.coordinator.state.jobs["j"].versions
    bring(pool, "a", held("u", WIKI))
    assert list(site_fetches(pool.coordinator.state, versions, "ab")) == ["b"]
    pool.cancel("j")
    pool.obey()
    pool.tell(VersionRemoved(now_s=2.0, entry_kind="data", owner="u", name="wiki", version=WIKI.version))
    assert site_fetches(pool.coordinator.state, versions, "ab") == {}


def test_copies_of_removed_versions_are_dropped() -> None:
    """A copy that no entry has any more is in the orders until the site no longer reports it."""
    pool = catalogued("a")
    bring(pool, "a", held("u", WIKI), held("u", TINY))
    assert pool.coordinator.orphaned_copies("a") == ()
    pool.tell(VersionRemoved(now_s=2.0, entry_kind="data", owner="u", name="wiki"))
    assert pool.coordinator.orphaned_copies("a") == (CopyKey(owner="u", version=WIKI.version),)
    bring(pool, "a", held("u", TINY))
    assert pool.coordinator.orphaned_copies("a") == ()


def test_a_job_that_trained_elsewhere_would_bring_its_checkpoint() -> None:
    """To sites with storage of their own, over the link from where it has trained; data counts as before."""
    pool = catalogued("a", "b")
    bring(pool, "a", held("u", WIKI))
    submit(pool, plan("a"))
    pool.obey("a")
    pool.obey("a")
    assert pool.state("j") == "running"
    state = pool.coordinator.state
    state.clusters["b"].free_storage_bytes = 10**12
    job_record = state.jobs["j"]
    found = site_fetches(state, job_record.versions, ["a", "b"], job_record)
    assert set(found) == {"b"}
    assert (found["b"].lacks_checkpoint, found["b"].data_bytes) == (True, 10**10)
    assert found["b"].num_bytes(reads_data=True, checkpoint_bytes=7) == 10**10 + 7
    assert found["b"].seconds(reads_data=False, checkpoint_bytes=10**9) == pytest.approx(8.0)


@pytest.mark.parametrize(("steps", "stays"), [(2, True), (10**9, False)])
def test_plans_are_ranked_by_the_time_to_the_end(tmp_path: Path, steps: int, *, stays: bool) -> None:
    """A short job starts where its files are; a long one where it trains fastest, after they have been brought."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    clusters = [
        one.model_copy(update={"node_groups": (one.node_groups[0].model_copy(update={"chip": chip}),)})
        for one, chip in zip(POOL.clusters, ("H20", "A100"), strict=True)
    ]
    pool = POOL.model_copy(update={"clusters": tuple(clusters)})
    wish = job(training={"steps": steps, "sequence_length": 8, "micro_batch_size": 1, "global_batch_size": 2})
    asked = PlanRequest(job=wish, model=load_model(tmp_path), pool=pool, free_chips=FREE)
    (fastest,) = propose_plans(asked).plans[0].clusters
    fetches = {fastest: SiteFetch(model_bytes=10**9, data_bytes=10**9, gbps=2.0)}
    best = propose_plans(asked.model_copy(update={"fetches": fetches})).plans[0]
    assert best.predicted is not None
    if stays:
        assert fastest not in best.clusters
        assert (best.predicted.bring_bytes, best.predicted.bring_s) == ({}, 0)
    else:
        assert best.clusters == (fastest,)
        assert best.predicted.bring_bytes == {fastest: 2 * 10**9}
        assert best.predicted.bring_s == pytest.approx(8.0)
        assert f"brings 1.9 GiB to {fastest}, 8.0 s" in best.why
        assert any("has measured no rate" in note for note in best.predicted.assumptions)
