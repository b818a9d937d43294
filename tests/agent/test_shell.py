"""The agent's shell over a fake adapter: what it saves, writes into folders, reads from them and removes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from isthmus.agent.adapters.scheduler_adapter import (
    Capabilities,
    CardNode,
    QueueMove,
    RankStart,
    SchedulerAdapter,
    SchedulerLook,
    WorkerStatus,
)
from isthmus.agent.files.site_storage import SiteStorage
from isthmus.agent.service.agent_service import AgentService
from isthmus.agent.service.agent_state_folder import LocalJobFile, log_tail, read_routes, submit_local_job, worker_spec
from isthmus.agent.service.part_table import PartTable
from isthmus.core.errors import FileError, UnavailableError
from isthmus.core.messages.agent_messages import AgentOrders, PartOrder, QueueEntry, RankMap, RunKeys
from isthmus.core.messages.worker_folder import WorkerAccount, WorkerFolder, WorkerKeys
from isthmus.core.plan import StageTime
from isthmus.core.pool import Pool
from isthmus.site import StartWorker
from isthmus.site.parts import SitePart, SiteWorker
from isthmus.site.site_invariants import check_site
from tests.full_disk import full_disk
from tests.site.samples import EAST, INVENTORY, JOB, address, order, orders, plan, states

pytestmark = pytest.mark.integration


class FakeAdapter(SchedulerAdapter):
    """Workers that are entries of a dictionary; it keeps the contract of `SchedulerAdapter` but has no processes."""

    capabilities = Capabilities(holds="agent", blocks=False)

    def __init__(self) -> None:
        self.workers: dict[Path, WorkerStatus] = {}
        self.started: list[tuple[Path, tuple[str, ...]]] = []
        self.broken, self.deaf = False, False
        self.waiting: list[QueueEntry] = []
        self.num_moves: list[int] = []

    def observe(self) -> SchedulerLook:
        nodes = [CardNode(name=group, node_group=group, cards=tuple(cards)) for group, cards in INVENTORY.items()]
        return SchedulerLook(nodes=tuple(nodes), queue=tuple(self.waiting))

    def start(self, rank: RankStart) -> None:
        if self.broken:
            raise UnavailableError("no process can be made")
        if rank.folder not in self.workers:
            self.workers[rank.folder] = WorkerStatus(state="running")
            self.started.append((rank.folder, rank.cards))

    def poll(self, folder: Path) -> WorkerStatus:
        return self.workers.get(folder, WorkerStatus(state="absent"))

    def stop(self, folder: Path, *, force: bool) -> None:
        if self.poll(folder).state != "exited" and not self.deaf:
            self.end(folder, 143)

    def order(self, moves: Sequence[QueueMove], removed: Sequence[QueueEntry] = ()) -> None:
        self.num_moves.append(len(moves))
        self.waiting = [entry for entry in self.waiting if entry not in removed]
        for move in moves:
            self.waiting = [entry for entry in self.waiting if entry != move.entry]
            at = 0 if move.after is None else self.waiting.index(move.after) + 1
            self.waiting.insert(at, move.entry)

    def end(self, folder: Path, status: int) -> None:
        self.workers[folder] = WorkerStatus(state="exited", exit_status=status)


class Site:
    """A shell with a clock, its adapter and its state folder; `restart` is a new life of the agent."""

    def __init__(self, state: Path, routes: Path | None = None, options: Mapping[str, Any] | None = None) -> None:
        self.state, self.routes, self.now_s, self.options = state, routes, 0.0, options or {}
        self.adapter = FakeAdapter()
        self.restart()

    def restart(self) -> None:
        self.shell = AgentService(
            cluster=EAST,
            adapter=self.adapter,
            state=self.state,
            clock=lambda: self.now_s,
            routes=self.routes,
            **self.options,
        )

    def obey(self, *parts: PartOrder) -> None:
        self.shell.apply_orders(orders(*parts))
        check_site(self.shell.machine)

    def run(self, *places: str) -> Path:
        """Take part a/1 to running; return the folder of its rank 0."""
        wanted = places or ("east/h20", "west/h20")
        self.obey(order("prepared", places=wanted))
        self.obey(order("running", places=wanted))
        return self.state / "runs" / "a" / "1" / "rank-0"

    @property
    def states(self) -> dict[str, str]:
        return states(self.shell.machine)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "state")


def test_a_worker_is_told_its_spec_and_given_its_cards(site: Site) -> None:
    """`spec.json` is there before the start; on a virtual chip with the plan's times for its stage."""
    folder = site.run("west/h20", "east/h20", "east/l40s")
    first, second = folder.with_name("rank-1"), folder.with_name("rank-2")
    assert site.adapter.started == [(first, ("h20/0/0",)), (second, ("l40s/0/0",))]
    spec = WorkerFolder(first).read_spec()
    assert (spec.run, spec.attempt, spec.rank, spec.host) == ("a", 1, 1, "127.0.0.1")
    assert spec.stage_time == StageTime(forward_s=0.1, backward_s=0.2)
    assert WorkerFolder(second).read_spec().stage_time is None, "a real chip takes the time it takes"


def test_the_table_is_on_disk_before_a_worker_is_started(tmp_path: Path) -> None:
    """A process that finds a worker running finds its part in the table."""
    site = Site(tmp_path)
    seen = []
    start = site.adapter.start
    site.adapter.start = lambda *a: (seen.append(PartTable(tmp_path).load().parts), start(*a))[1]  # type: ignore
    site.run()
    assert [(part.state, part.live) for part in seen[0]] == [("running", True)]


def test_a_new_life_goes_on_with_what_it_finds(site: Site) -> None:
    """Prepared devices stay held, running workers are not started again, what ended meanwhile is reported."""
    folder = site.run("east/h20", "east/h20")
    site.obey(order("running"), order("prepared", job="b"))
    site.adapter.end(folder, 0)
    site.restart()
    site.shell.tick()
    assert site.states == {"a/1": "running", "b/1": "prepared"}
    site.adapter.end(folder.with_name("rank-1"), 0)
    site.shell.tick()
    assert site.states == {"a/1": "succeeded", "b/1": "prepared"}
    assert len(site.adapter.started) == 2


def test_addresses_and_rank_map_pass_through_the_folder(site: Site) -> None:
    """`checkin.json` goes up in the report, the rank map comes down as `ranks.json`."""
    folder = site.run()
    WorkerFolder(folder).write_checkin(address())
    site.shell.tick()
    report, _ = site.shell.report("i")
    assert report.parts[0].workers == (address(),)
    ranks = RankMap(workers=(address(), address(1)))
    site.obey(order("running", ranks=ranks))
    assert WorkerFolder(folder).read_rank_map() == ranks


KEYS = RunKeys(job="a", attempt=1, keys={"east": "0a" * 32, "west": "0b" * 32})


def test_keys_are_handed_over_in_a_file_of_the_worker_alone(site: Site) -> None:
    """Before the start, mode 0600; they are in no other file of the agent, and in no report."""
    site.obey(order("prepared"))
    site.shell.apply_orders(AgentOrders(parts=(order("running"),), run_keys=(KEYS,)))
    folder = site.state / "runs" / "a" / "1" / "rank-0"
    assert site.adapter.started
    assert WorkerFolder(folder).keys_path.stat().st_mode & 0o777 == 0o600
    assert WorkerFolder(folder).take_keys() == WorkerKeys(keys=KEYS.keys)
    assert not WorkerFolder(folder).keys_path.exists()
    site.shell.tick()
    texts = [file.read_text() for file in site.state.rglob("*") if file.is_file()]
    texts.append(site.shell.report("i")[0].model_dump_json())
    assert not any(key in text for key in KEYS.keys.values() for text in texts)


def test_without_keys_no_worker_listens_beyond_this_machine(tmp_path: Path) -> None:
    """Nor where the agent needs them: the part fails with the reason, and the job can restart."""
    for number, options in enumerate([{"host": "10.0.0.1"}, {"needs_keys": True}]):
        site = Site(tmp_path / str(number), options=options)
        site.run()
        assert site.adapter.started == []
        assert site.states == {"a/1": "failed"}
        assert "no keys for links of a/1" in site.shell.machine.observed_parts()[0].detail


def test_keys_outlive_an_agent_that_ends_before_the_start(tmp_path: Path) -> None:
    """The next one starts the worker with the keys that lie in its folder, for the server does not send them again."""
    site = Site(tmp_path, options={"needs_keys": True})
    site.obey(order("prepared"))
    site.shell.apply_orders(AgentOrders(parts=(order("running"),), run_keys=(KEYS,)))
    site.adapter.workers.clear()
    site.restart()
    site.shell._execute(StartWorker(part=site.shell.machine.parts["a", 1], rank=0))
    assert len(site.adapter.started) == 2
    assert site.states == {"a/1": "running"}
    assert WorkerFolder(site.state / "runs/a/1/rank-0").take_keys() == WorkerKeys(keys=KEYS.keys)


@pytest.mark.attack
def test_keys_that_another_account_put_there_are_not_used(tmp_path: Path) -> None:
    """Nor a link: the part fails for want of keys, as without the file."""
    folder, account = WorkerFolder(tmp_path), WorkerAccount(name="j", uid=os.geteuid() + 1, gid=1)
    folder.write_keys(WorkerKeys(keys=KEYS.keys))
    assert folder.left_keys(account) == WorkerKeys(keys=KEYS.keys)
    if os.geteuid() == 0:
        os.chown(folder.keys_path, account.uid + 1, -1)
        assert folder.left_keys(account) is None
    folder.keys_path.rename(tmp_path / "elsewhere")
    folder.keys_path.symlink_to(tmp_path / "elsewhere")
    assert folder.left_keys(account) is None


def test_keys_of_a_deposed_leader_are_ignored(site: Site) -> None:
    """They come with orders that the agent does not follow."""
    site.obey(order("prepared"))
    site.shell.apply_orders(AgentOrders(fence=5, parts=(order("prepared"),)))
    site.shell.apply_orders(AgentOrders(fence=4, parts=(order("running"),), run_keys=(KEYS,)))
    site.shell.apply_orders(AgentOrders(fence=5, parts=(order("running"),)))
    assert site.adapter.started
    assert WorkerFolder(site.state / "runs/a/1/rank-0").take_keys() is None


def test_a_failure_is_told_with_the_last_words(site: Site) -> None:
    """The line of the log that names the error, not what came after it."""
    folder = site.run()
    (folder / "log").write_text("step 1\nValueError: bad data\ncleaning up\n")
    site.adapter.end(folder, 1)
    site.shell.tick()
    assert site.shell.machine.observed_parts()[0].detail == "rank 0 ended with status 1: ValueError: bad data"


@pytest.mark.parametrize(("log", "words"), [(b"", ""), (b"\n \n", ""), (b"a\nb\n", "b"), (b"\xff", "\ufffd")])
def test_last_words_of_any_log(tmp_path: Path, log: bytes, words: str) -> None:
    """Any bytes have last words."""
    (tmp_path / "log").write_bytes(log)
    assert log_tail(tmp_path) == words


def test_a_worker_that_cannot_be_started_fails_the_part(site: Site) -> None:
    """No process to be had: failed, with the adapter's words, and nothing is left to start later."""
    site.adapter.broken = True
    folder = site.run()
    assert site.states == {"a/1": "failed"}
    assert "no process can be made" in site.shell.machine.observed_parts()[0].detail
    assert site.adapter.poll(folder).state == "exited"


def test_on_a_full_disk_nothing_is_started_or_told_until_it_can_be_saved(site: Site) -> None:
    """The script: 1. full disk; 2. ordered to run; 3. nothing starts, no report; 4. space; 5. it starts."""
    site.obey(order("prepared"))
    with full_disk():
        site.obey(order("running"))
        assert site.adapter.started == []
        site.shell.tick()
        with pytest.raises(UnavailableError, match="cannot write"):
            site.shell.report("i")
    site.shell.tick()
    assert len(site.adapter.started) == 1
    assert site.shell.report("i")[0].parts[0].state == "running"


def test_on_a_full_disk_workers_are_still_stopped(site: Site) -> None:
    """Letting go needs no disk: the server's word to release is carried out at once."""
    folder = site.run()
    with full_disk():
        site.obey(order("released"))
    assert site.adapter.poll(folder).state == "exited"
    site.shell.tick()
    assert site.states == {"a/1": "released"}


def test_what_is_forgotten_goes_once_its_lines_are_stored(site: Site) -> None:
    """The folder of a released part stays until the server has its log, and no longer."""
    folder = site.run()
    (folder / "log").write_text("a line\n")
    site.obey()
    site.shell.tick()
    site.obey()
    assert site.states == {}
    site.shell.tick()
    assert folder.exists(), "its log is not stored yet"
    _, batch = site.shell.report("i")
    site.shell.outbox.acknowledge(batch)
    site.shell.tick()
    assert list((site.state / "runs").iterdir()) == []


def test_shutdown_ends_when_nothing_is_left(site: Site) -> None:
    """`ended` waits for the last process."""
    site.run()
    site.adapter.deaf = True
    site.shell.shut_down()
    site.shell.tick()
    assert not site.shell.stopped
    site.adapter.end(site.state / "runs" / "a" / "1" / "rank-0", 143)
    site.shell.tick()
    assert site.shell.stopped
    assert site.states == {"a/1": "released"}


def test_routes_are_read_anew_at_each_start(tmp_path: Path) -> None:
    """A change of the routes needs no restart of the agent."""
    routes = tmp_path / "routes.json"
    routes.write_text("{}")
    site = Site(tmp_path / "state", routes)
    routes.write_text(json.dumps({"east": {"west": "127.0.0.1:7001"}, "west": {"east": "127.0.0.1:7002"}}))
    folder = site.run()
    assert WorkerFolder(folder).read_spec().routes == {"west": "127.0.0.1:7001"}


@pytest.mark.parametrize("content", [None, "[]", '{"east": 1}', "{"])
def test_broken_routes_are_refused_at_the_start_by_file(tmp_path: Path, content: str | None) -> None:
    """A file that is missing or is not routes: named before any part is taken."""
    routes = tmp_path / "routes.json"
    if content is not None:
        routes.write_text(content)
    with pytest.raises(FileError, match=r"routes\.json"):
        read_routes(routes, "east")


def test_a_table_of_another_version_is_named_and_left_alone(tmp_path: Path) -> None:
    """What this agent cannot read it does not overwrite."""
    (tmp_path / "parts.json").write_text('[{"what": 1}]')
    with pytest.raises(FileError, match=r"parts\.json"):
        Site(tmp_path)
    assert (tmp_path / "parts.json").read_text() == '[{"what": 1}]'


def test_a_plan_without_times_leaves_the_chip_as_it_is() -> None:
    """No prediction, no stage time: the worker computes at its own pace."""
    workers = {0: SiteWorker(node_group="h20", chips=1)}
    part = SitePart(job="a", attempt=1, spec=JOB, plan=plan(timed=False), workers=workers)
    assert worker_spec(part, 0, EAST, host="127.0.0.1", routes={}, storage=SiteStorage()).stage_time is None


def test_links_by_rdma_are_told_to_the_workers() -> None:
    """A worker uses a card of its node to the clusters at the other end of such links, and to no other one."""
    groups = [{"chip": "L40S", "nodes": 1, "chips_per_node": 1}]
    clusters = [{"name": name, "owner": "o", "node_groups": groups} for name in "abc"]
    links = [
        {"between": ["a", "b"], "bandwidth_gbps": 100, "delay_ms": 0.01, "transport": "rdma"},
        {"between": ["b", "c"], "bandwidth_gbps": 1, "delay_ms": 10},
    ]
    pool = Pool.model_validate({"clusters": clusters, "links": links})
    assert [pool.rdma_peers(name) for name in "abc"] == [["b"], ["a"], []]
    workers = {0: SiteWorker(node_group="h20", chips=1)}
    part = SitePart(job="a", attempt=1, spec=JOB, plan=plan(), workers=workers)
    spec = worker_spec(part, 0, EAST, host="127.0.0.1", routes={}, rdma=["west"], storage=SiteStorage())
    assert [spec.rdma_device(name) for name in ("west", "north", spec.cluster)] == ["auto:0", None, None]
    one_way = {"from": "a", "to": "b", "bandwidth_gbps": 1, "delay_ms": 0.1}
    back = {"from": "b", "to": "a", "bandwidth_gbps": 1, "delay_ms": 0.1, "transport": "rdma"}
    for wrong in ([one_way, back], [back, one_way], [{**back, "crossing": {"key": "k"}}]):
        with pytest.raises(ValueError, match=r"transport"):
            Pool.model_validate({"clusters": clusters, "links": wrong})


def test_a_virtual_job_waits_on_any_chip() -> None:
    """`compute: virtual` gives a worker the plan's times for its stage, also on a real chip."""
    job = JOB.model_copy(update={"compute": "virtual"})
    workers = {1: SiteWorker(node_group="l40s", chips=1)}
    part = SitePart(job="a", attempt=1, spec=job, plan=plan(("west/h20", "east/l40s")), workers=workers)
    spec = worker_spec(part, 1, EAST, host="127.0.0.1", routes={}, storage=SiteStorage())
    assert spec.stage_time == StageTime(forward_s=0.1, backward_s=0.2)


def test_local_jobs_come_and_go_by_their_folders(site: Site) -> None:
    """`job.json` queues a job, `exit` ends it, `cancel` stops it; its folder stays with its owner."""
    one = submit_local_job(site.state, "one", LocalJobFile(command=("true",), node_group="h20", chips=2))
    two = submit_local_job(site.state, "two", LocalJobFile(command=("true",), node_group="h20", chips=2))
    site.shell.tick()
    assert [folder for folder, _ in site.adapter.started] == [one / "run-0"]
    assert site.shell.report("i")[0].free_chips == {"h20": 0, "l40s": 2}
    site.adapter.end(one / "run-0", 0)
    site.shell.tick()
    assert (one / "exit").read_text() == "0\n"
    assert [folder for folder, _ in site.adapter.started] == [one / "run-0", two / "run-0"]
    (two / "cancel").touch()
    site.shell.tick()
    site.shell.tick()
    assert site.shell.machine.parts == {}
    assert site.shell.report("i")[0].free_chips == {"h20": 3, "l40s": 2}
    assert one.exists()


def test_a_local_job_that_never_fits_is_told_so_in_its_folder(site: Site) -> None:
    """More devices than there are, an unknown group, no JSON: status 2 and the reason in its log."""
    for name, job in (("big", '{"command": ["x"], "node_group": "h20", "chips": 9}'), ("bad", "{")):
        folder = site.state / "local" / name
        folder.mkdir(parents=True)
        (folder / "job.json").write_text(job)
    site.shell.tick()
    assert site.adapter.started == []
    assert "needs 9 chips of node group 'h20'" in (site.state / "local" / "big" / "log").read_text()
    assert (site.state / "local" / "bad" / "exit").read_text() == "2\n"


def test_whatever_lies_among_local_jobs_ends_no_agent(site: Site) -> None:
    """Folders whose name is none, no command, a folder for a file, a link to nowhere: the others run."""
    for name, job in (("my job", '["true"]'), ("\u4f5c\u4e1a", '["true"]'), ("idle", "[]")):
        folder = site.state / "local" / name
        folder.mkdir(parents=True)
        (folder / "job.json").write_text(f'{{"command": {job}, "node_group": "h20"}}')
    (site.state / "local" / "folder" / "job.json").mkdir(parents=True)
    (site.state / "local" / "gone").mkdir()
    (site.state / "local" / "gone" / "job.json").symlink_to("nowhere")
    good = submit_local_job(site.state, "good", LocalJobFile(command=("true",), node_group="h20"))
    site.shell.tick()
    assert [folder for folder, _ in site.adapter.started] == [good / "run-0"]
    assert [job.name for job in site.shell.report("i")[0].local_jobs] == ["good"]
    assert "is not a valid job name" in (site.state / "local" / "my job" / "log").read_text()
    assert (site.state / "local" / "folder" / "exit").read_text() == "2\n"


def test_a_running_local_job_whose_file_does_not_read_for_once_runs_on(site: Site) -> None:
    """No more open files, a disk elsewhere that hangs: nothing is known of the job, and it is left alone."""
    job = submit_local_job(site.state, "one", LocalJobFile(command=("true",), node_group="h20"))
    site.shell.tick()
    (job / "job.json").rename(job / "kept")
    (job / "job.json").symlink_to("/proc/self/mem")  # reading it fails with EIO
    site.shell.tick()
    (job / "kept").rename(job / "job.json")
    assert not (job / "exit").exists()
    assert [part.state for part in site.shell.machine.parts.values()] == ["running"]
    site.shell.tick()
    assert [folder for folder, _ in site.adapter.started] == [job / "run-0"]


def test_strange_files_among_runs_end_no_agent(site: Site) -> None:
    """Other files beside a job's attempts, such as notes and copies, are left alone and not reported."""
    attempt = site.run().parent
    (attempt.parent / "notes.txt").write_text("look here")
    copy = attempt.with_name("1.bak")
    shutil.copytree(attempt, copy)
    (copy / "rank-0" / "log").write_text("a line\n")
    site.shell.tick()
    assert site.shell.report("i")[0].logs == ()
    assert copy.exists()


def test_a_full_disk_is_complained_of_once(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Twenty looks a second would fill the log, which may lie on the same disk."""
    with full_disk():
        for _ in range(5):
            site.obey(order("prepared"))
    assert len(caplog.records) == 1
    site.obey(order("prepared"))
    with full_disk():
        site.obey(order("running"))
    assert len(caplog.records) == 2


def test_on_a_full_disk_the_rank_map_waits_and_reports_go_on(site: Site) -> None:
    """1. full disk; 2. the rank map comes, the server stores a log; 3. space; 4. the map is handed out."""
    folder = site.run()
    (folder / "log").write_text("a line\n")
    _, batch = site.shell.report("i")
    ranks = RankMap(workers=(address(),))
    with full_disk():
        site.obey(order("running", ranks=ranks))
        site.shell.outbox.acknowledge(batch)
        site.shell.tick()
    assert WorkerFolder(folder).read_rank_map() is None
    assert site.shell.report("i")[0].logs == (), "what is stored is not sent twice"
    site.shell.tick()
    assert WorkerFolder(folder).read_rank_map() == ranks


def test_on_a_full_disk_a_local_job_that_cannot_run_is_told_so_later(site: Site) -> None:
    """Its reason needs a file; the agent goes on without, and says it when there is space."""
    wrong = submit_local_job(site.state, "own", LocalJobFile(command=("true",), node_group="gpu"))
    with full_disk():
        site.shell.tick()
    assert not (wrong / "exit").exists()
    site.shell.tick()
    assert (wrong / "exit").read_text() == "2\n"


def test_what_a_worker_writes_is_seen_and_does_not_wear_the_disk(site: Site) -> None:
    """Its lines are a sign of life, noted in memory only: the part table is written at changes of state."""
    folder = site.run()
    table = PartTable(site.state).path
    before = table.stat().st_mtime_ns
    (folder / "log").write_text("a line\n")
    (folder / "metrics.jsonl").write_text("{}\n")
    site.shell.tick()
    assert site.shell.machine.parts["a", 1].workers[0].num_bytes == 10
    assert table.stat().st_mtime_ns == before
