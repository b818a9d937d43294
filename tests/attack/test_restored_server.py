"""A server that was restored from a backup speaks below its sites' fences and does not know what they run."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.server.backup_file import write_backup
from isthmus.control.server.log_end_file import LogEndFile
from isthmus.control.server.restore_store import accept_log, restore_backup
from isthmus.control.server.server_config import ServerConfig, open_store
from isthmus.control.service.control_service import ControlService
from isthmus.control.state.invariants import violations
from isthmus.control.store.sql_queries import SqlQueries
from isthmus.core.errors import IsthmusError, NotFoundError
from isthmus.core.messages.agent_messages import AgentReport
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.plan import PlanSet
from isthmus.core.views.api_views import JobView
from tests.control.samples import plan, submission
from tests.control.test_coordinator_with_agents import Site

pytestmark = pytest.mark.attack


class Pool:
    """Sites `a`, `b`, `c` with the agents' real machines, whose processes are objects, and one real server."""

    def __init__(self, folder: Path) -> None:
        self.now_s, self.folder, self.plan = 1000.0, folder, plan("a", "b")
        self.sites = {name: Site(name, OwnerPolicy()) for name in "abc"}
        self.silent: set[str] = set()
        self.most_attempts, self.first, self.second = 0, "", ""
        self.start()

    @property
    def config(self) -> ServerConfig:
        return ServerConfig(state=self.folder)

    def start(self) -> None:
        """Start the server on its folder, as `run_server` does."""
        self.folder.mkdir(exist_ok=True)
        self.log_end = LogEndFile(self.folder)
        self.store = open_store(self.config)
        assert isinstance(self.store, SqlQueries)
        self.log_end.follow(self.store)
        self.server = ControlService(
            self.store, planner=lambda _: PlanSet(plans=(self.plan,)), clock=lambda: self.now_s
        )
        self.server.tick()

    def stop(self) -> None:
        self.server.close()
        self.log_end.close()
        self.store.close()

    def restart(self, times: int) -> None:
        for _ in range(times):
            self.stop()
            self.start()
            self.turns(2)

    def submit(self, name: str, *sites: str) -> JobView:
        self.plan = plan(*sites)
        request = self.server.submissions.submit_request("ann", submission(name, root=f"/{name}/"))
        found: JobView = self.server.execute([request])[0].value()
        self.until(lambda: self.server.job(found.id).state == "running", f"{name} runs")
        return found

    def turns(self, count: int = 1) -> None:
        """Seconds: every site looks, reports and obeys; the server ticks."""
        for _ in range(count):
            self.now_s += 1
            for name, site in self.sites.items():
                site.look(self.now_s)
                if name not in self.silent:
                    site.obey(self.server.agents.sync(self.report(site)), self.now_s)
            self.server.tick()
            self._count_attempts()

    def report(self, site: Site) -> AgentReport:
        return AgentReport(
            cluster=site.cluster,
            incarnation="1",
            free_chips=site.machine.free_chips(),
            parts=site.machine.observed_parts(),
            local_jobs=site.machine.local_jobs(),
            fence=site.machine.fence,
        )

    def _count_attempts(self) -> None:
        attempts: dict[str, set[int]] = {}
        for site in self.sites.values():
            for (job, attempt, _), alive in site.running.items():
                if alive:
                    attempts.setdefault(job, set()).add(attempt)
        self.most_attempts = max([self.most_attempts, *map(len, attempts.values())])

    def until(self, wanted: object, what: str) -> None:
        for _ in range(60):
            if wanted():  # type: ignore[operator]
                return
            self.turns()
        raise AssertionError(f"not within 60 turns: {what}")

    def runs(self, job: str) -> set[tuple[str, int]]:
        """Return the (site, attempt) pairs with processes of a job."""
        return {
            (name, attempt)
            for name, site in self.sites.items()
            for (other, attempt, _), alive in site.running.items()
            if alive and other == job
        }

    def kill(self, job: str, at: str) -> None:
        for key in self.sites[at].running:
            if key[0] == job:
                self.sites[at].running[key] = False


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    """A pool whose backup has job `one` in attempt 1; since then `one` began attempt 2, and `two` was submitted.

    The server has then been restarted three times, so that the sites have obeyed later epochs than the backup has.
    """
    pool = Pool(tmp_path / "server")
    pool.first = pool.submit("one", "a", "b").id
    write_backup(pool.config, tmp_path / "backup.db")
    pool.kill(pool.first, "a")
    pool.until(lambda: pool.runs(pool.first) == {("a", 2), ("b", 2)}, "attempt 2")
    pool.second = pool.submit("two", "c").id
    pool.restart(3)
    pool.stop()
    return pool


def check_reconciled(pool: Pool) -> None:
    """The sites obey again, what ran goes on, nothing runs twice, and everything ends as its user or operator says."""
    one, two = pool.first, pool.second
    fences = {site.machine.fence for site in pool.sites.values()}
    pool.turns(20)
    epoch = pool.server.gauges()["isthmus_epoch"][1]
    assert epoch > max(fences)
    assert {site.machine.fence for site in pool.sites.values()} == {epoch}
    assert pool.runs(one) == {("a", 2), ("b", 2)}, "an attempt that the log does not have goes on"
    assert pool.runs(two) == {("c", 1)}, "a job that the log does not have goes on"
    unknown = {
        (view.cluster.name, part.job, part.attempt)
        for view in pool.server.pool().clusters
        for part in view.unknown_parts
    }
    assert unknown == {("a", one, 2), ("b", one, 2), ("c", two, 1)}
    assert "attempt 2 of the job, begun after the backup" in pool.server.job(one).reason
    third = pool.submit("three", "c").id
    assert pool.runs(third) == {("c", 1)}, "the sites obey"
    pool.server.end_unknown(two)
    pool.until(lambda: not pool.runs(two), "an operator ends the unknown job")
    with pytest.raises(NotFoundError, match="no site runs a job"):
        pool.server.end_unknown("never-seen")
    pool.kill(one, "b")
    pool.until(lambda: pool.runs(one) == {("a", 3), ("b", 3)}, "the next attempt has a number of its own")
    assert pool.most_attempts == 1
    pool.server.cancel(one)
    pool.until(lambda: not pool.runs(one), "cancelled")
    assert not [part for view in pool.server.pool().clusters for part in view.unknown_parts]


def test_a_backup_that_is_restored_by_the_command_runs_nothing_twice(pool: Pool, tmp_path: Path) -> None:
    """The script: 1. backup; 2. attempts, jobs and epochs beyond it; 3. restore elsewhere; 4. the sites report."""
    pool.folder = tmp_path / "again"
    report = restore_backup(pool.config, tmp_path / "backup.db", pool.now_s, [], replaces=False)
    assert report.problems == ()
    pool.start()
    check_reconciled(pool)
    pool.stop()


def test_a_state_folder_that_was_copied_back_is_noticed_by_the_fences(pool: Pool, tmp_path: Path) -> None:
    """Without any command: the sites' fences say that the log is older than the pool."""
    pool.folder = tmp_path / "copied"
    pool.folder.mkdir()
    (pool.folder / "isthmus.db").write_bytes((tmp_path / "backup.db").read_bytes())
    pool.start()
    check_reconciled(pool)
    pool.stop()


def test_jobs_of_the_backup_wait_for_every_site(pool: Pool, tmp_path: Path) -> None:
    """A site that has not reported may run a later attempt; one that the operator calls gone is not waited for."""
    pool.folder, pool.silent = tmp_path / "again", {"c"}
    restore_backup(pool.config, tmp_path / "backup.db", pool.now_s, [], replaces=False)
    pool.start()
    pool.kill(pool.first, "a")
    pool.turns(40)
    assert pool.runs(pool.first) == set()
    assert "the job may run at c: waits until it has reported" in pool.server.job(pool.first).reason
    assert [view.cluster.name for view in pool.server.pool().clusters if view.awaited] == ["c"]
    pool.stop()
    accept_log(pool.config, pool.now_s, ["c"])
    pool.start()
    pool.until(lambda: pool.runs(pool.first) == {("a", 3), ("b", 3)}, "it starts")
    assert pool.most_attempts == 1
    pool.stop()


def test_a_lying_fence_raises_the_epoch_at_most_once_a_minute(pool: Pool) -> None:
    """An owner's agent that claims later and later epochs: bounded numbers, bounded events, the others obey on."""
    pool.start()
    pool.turns(2)
    liar = pool.sites["c"]
    epochs = set()
    for number in range(30):
        pool.now_s += 1
        pool.server.agents.sync(pool.report(liar).model_copy(update={"fence": 10**6 + 1000 * number}))
        pool.server.tick()
        epochs.add(pool.server.gauges()["isthmus_epoch"][1])
    assert len(epochs) <= 2
    with pytest.raises(ValueError, match="less than or equal to"):
        AgentReport.model_validate(pool.report(liar).model_dump() | {"fence": 2**63})
    pool.until(lambda: pool.sites["a"].machine.fence > 10**6, "the others obey")
    assert (
        violations(Coordinator.replay(event for _, event in pool.store.events()).state, pool.now_s, grace_s=100) == []
    )
    pool.stop()


def test_a_restore_overwrites_nothing_unasked_and_takes_no_damaged_file(pool: Pool, tmp_path: Path) -> None:
    """The database that is there stays, also with `replaces`; a file that is no backup is refused."""
    backup = tmp_path / "backup.db"
    with pytest.raises(IsthmusError, match=r"isthmus\.db exists already"):
        restore_backup(pool.config, backup, pool.now_s, [], replaces=False)
    broken = tmp_path / "broken.db"
    broken.write_bytes(backup.read_bytes()[: 3 * 4096])
    with pytest.raises(IsthmusError):
        restore_backup(pool.config, broken, pool.now_s, [], replaces=True)
    before = (pool.folder / "isthmus.db").read_bytes()
    restore_backup(pool.config, backup, pool.now_s, [], replaces=True)
    assert (pool.folder / "isthmus.db.replaced-1").read_bytes() == before
    pool.start()
    pool.stop()
