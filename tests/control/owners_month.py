"""`OwnersMonth`: a month of load of a pool of three owners, through the real server and the real agents, by one clock.

The server is `ControlService` with its REST application and its SQLite store, the agents are `AgentLoop`,
`AgentService` and `SyncClient` with their state folders. Only the clock is passed in, which jumps from one event to the
next, and the adapter, whose workers end when the clock says so. Between the events there is a report every `idle_s`.

Faults: agents killed and started again, sites cut off, the server killed at once, owners that take cards back for jobs
of their own, programs that fail, users that cancel, prices that change. Each owner counts on its own: what the agent's
record of cards says at the prices that it has published, less what it owes back by the rules of the guide.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import anyio.to_thread
import httpx

from isthmus.agent.service.agent_loop import AgentLoop
from isthmus.agent.service.agent_service import AgentService
from isthmus.agent.service.agent_state_folder import LocalJobFile, submit_local_job
from isthmus.agent.service.sync_client import SyncClient
from isthmus.control.placement import PlanRequest
from isthmus.control.rest.create_app import create_app
from isthmus.control.service.auth import token_digest
from isthmus.control.service.control_service import ControlService
from isthmus.control.simulation.compare_waits import compare_waits
from isthmus.control.state.coordinator_config import CoordinatorConfig
from isthmus.control.store.sqlite_store import SqliteStore
from isthmus.control.store.store_interface import StoredToken
from isthmus.core.messages.agent_messages import WorkerAddress
from isthmus.core.messages.worker_folder import WorkerFolder
from isthmus.core.months import next_month_ms
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.owner.tariff import Tariff
from isthmus.core.plan import Plan, PlanSet, Refusal, Stage
from isthmus.core.records.held_interval import HeldInterval, RecordedPart
from isthmus.core.records.read_records import RecordFiles, read_records
from isthmus.core.views.api_views import JobFilter, JobState, JobView
from isthmus.core.views.ledger_views import LedgerCheckView, StatementView
from isthmus.core.views.wait_views import OwnerWaits, WaitedJobsPage
from tests.control.clock_site import CHIPS, POOL, SITES, ClockAdapter
from tests.control.owner_count import OwnerCount, ProgramRun
from tests.control.serving import submission

BEGIN_S = 1_796_083_200.0  # 2026-12-01T00:00:00Z
MONTH = "2026-12"
MILLIONTHS_PER_CENT = 10_000
PLANNING_LIMIT_S = 60.0
MAX_ROUNDS = 200
RUNNING_IDLE_S = 6_000.0
"""Longest step while a job runs: an agent ends workers that it has not seen write for two hours."""
OPEN: tuple[JobState, ...] = tuple(one for one in get_args(JobState) if one not in ("succeeded", "failed", "cancelled"))


@dataclass(frozen=True, kw_only=True)
class MonthLoad:
    """How much happens in the month: jobs, faults of each kind, price changes, and the time between idle reports."""

    jobs: int = 1_000
    faults: int = 12
    price_changes: int = 60
    idle_s: float = 3_600.0
    longest_h: float = 8.0


SHORT = MonthLoad(jobs=10, faults=1, price_changes=5, idle_s=43_200.0, longest_h=9.0)


async def run_here(function: Callable[..., Any], *arguments: Any, **_options: Any) -> Any:
    """Run a synchronous endpoint in this thread: nothing else is to be served meanwhile."""
    return function(*arguments)


@dataclass(kw_only=True)
class OwnersMonth:
    """The month; `run` plays it, then `differences` has what is wrong and `cents` the totals by owner."""

    folder: Path
    load: MonthLoad
    seed: int
    now_s: float = BEGIN_S
    counts: Counter[str] = field(default_factory=Counter)
    # By owner: what the server's statement says, and what the owner counted, in hundredths.
    cents: dict[str, tuple[int, int]] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    # How long the user of the first site's owner waited, and would have waited without the pool.
    waits: OwnerWaits | None = None

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._adapters = {site: ClockAdapter(site, self._on_start) for site in SITES}
        self._loops: dict[str, AgentLoop] = {}
        self._cut_off: set[str] = set()
        self._owners = OwnerCount(prices={site: [] for site in SITES})
        self._wanted: dict[str, tuple[float, int]] = {}
        self._store: SqliteStore | None = None
        self._runner = asyncio.Runner()

    def run(self) -> None:
        """Play the month, and one more day so that it is over."""
        self._start_server()
        for site in SITES:
            self._start_agent(site)
        self._settle()
        for site in SITES:
            self._publish(site)
        self._plan_load()
        end_s = next_month_ms(round(BEGIN_S * 1000)) / 1000 + 86_400
        while self.now_s < end_s:
            idle_s = min(self.load.idle_s, RUNNING_IDLE_S) if self._open_jobs() else self.load.idle_s
            next_s = min(self._due[0][0] if self._due else end_s, self.now_s + idle_s, end_s)
            self.now_s = max(self.now_s, next_s)
            while self._due and self._due[0][0] <= self.now_s:
                heapq.heappop(self._due)[2]()
            for adapter in self._adapters.values():
                adapter.let_write()
            self._settle()
        self._compare()

    def _at(self, at_s: float, do: Callable[[], None]) -> None:
        # Whole seconds, which server and owners write in the same way.
        heapq.heappush(self._due, (max(self.now_s, float(round(at_s))), next(self._numbers), do))

    # The server.

    def _start_server(self) -> None:
        """Start the server on what its store has; a killed one has closed nothing but its file."""
        if self._store is not None:
            self._store.close()
        self._store = SqliteStore(self.folder / "isthmus.db")
        if not self.counts["server started"]:
            names = [("admin", "root"), ("user", "ann"), *(("owner", f"owner-{site}") for site in SITES)]
            for role, name in names:
                self._store.put_token(
                    StoredToken(role=role, name=name, digest=token_digest(f"token-{name}"), created_s=self.now_s)
                )
        patient = 3 * self.load.idle_s
        rules = CoordinatorConfig(
            agent_timeout_s=patient, reservation_timeout_s=9 * patient, start_timeout_s=9 * patient,
            lease_s=9 * patient, checkpoint_timeout_s=9 * patient, eviction_timeout_s=9 * patient,
            run_lease_s=0, retry_s=1, max_retry_s=60,
        )  # fmt: skip
        self._service = ControlService(self._store, POOL, planner=self._plans, rules=rules, clock=lambda: self.now_s)
        transport = httpx.ASGITransport(create_app(self._service), raise_app_exceptions=False)
        self._http = httpx.AsyncClient(transport=transport, base_url="http://testserver")
        self._service.tick()
        self.counts["server started"] += 1

    def _call(self, method: str, path: str, token: str, body: str | None = None) -> httpx.Response:
        head = {"Authorization": f"Bearer token-{token}", "Content-Type": "application/json"}
        answer = self._ask(method, path, body, head)
        assert answer.status_code < 400, f"{method} {path}: {answer.text}"
        return answer

    def _ask(self, method: str, path: str, body: str | bytes | None, head: Mapping[str, str]) -> httpx.Response:
        """Send a request to the application, all of it in this thread."""
        with patch.object(anyio.to_thread, "run_sync", run_here):
            return self._runner.run(self._http.request(method, path, content=body, headers=dict(head)))

    def _transport(self, site: str) -> httpx.MockTransport:
        """Return a transport to the server of the time, broken while the site is cut off."""

        def answer(request: httpx.Request) -> httpx.Response:
            if site in self._cut_off:
                raise httpx.ConnectError("cut off")
            head = {name: value for name, value in request.headers.items() if name != "host"}
            path = str(request.url.copy_with(host="testserver", scheme="http"))
            found = self._ask(request.method, path, request.content, head)
            return httpx.Response(found.status_code, content=found.content, headers=found.headers)

        return httpx.MockTransport(answer)

    def _plans(self, asked: PlanRequest) -> PlanSet:
        """Plan a job at as many sites as it wants, where most cards are free and no agent is away."""
        _, name, num_sites, chips = asked.job.name.split("-")
        free = {site: sum(groups.values()) for site, groups in asked.free_chips.items() if self._is_up(site)}
        sites = sorted((site for site in free if free[site] >= int(chips)), key=lambda site: (-free[site], site))
        sites = sorted(sites[: int(num_sites)])
        if len(sites) < int(num_sites):
            return PlanSet(plans=(), refused=(Refusal(clusters=tuple(free), reason="no free cards"),))
        places = [site for site in sites for _ in range(int(chips))]
        ends = [*range(1, len(places)), max(4, len(places))]
        stages = tuple(
            Stage(cluster=site, node_group="g", layers=(at, end))
            for at, (site, end) in enumerate(zip(places, ends, strict=True))
        )
        return PlanSet(plans=(Plan(id=name, stages=stages, micro_batches=8, micro_batch_size=1, sequence_length=8),))

    # The agents.

    def _start_agent(self, site: str) -> None:
        service = AgentService(
            cluster=POOL.cluster(site), adapter=self._adapters[site], state=self.folder / site,
            clock=lambda: self.now_s, wall_clock=lambda: self.now_s, pool=POOL,
            policy=OwnerPolicy(protect_s=0, grace_s=0, hold_s=1),
        )  # fmt: skip
        client = SyncClient("http://server", f"token-owner-{site}", site, transport=self._transport(site))
        self._loops[site] = AgentLoop(service, client, random.Random(next(self._numbers)))

    def _is_up(self, site: str) -> bool:
        return site in self._loops and site not in self._cut_off

    def _settle(self) -> None:
        """Let server and agents exchange reports until nothing changes any more at this moment."""
        num_calm = 0
        for _ in range(MAX_ROUNDS):
            before = self._service.last_event()
            self._service.tick()
            for loop in tuple(self._loops.values()):
                loop.service.tick()
                loop.send_final_report()
            self._await_plans()
            num_calm = 0 if self._service.last_event() != before else num_calm + 1
            if num_calm == 2:  # in the first one an agent may have got orders
                return
        raise AssertionError(f"no end of changes at {self.now_s - BEGIN_S:.0f} s")

    def _await_plans(self) -> None:
        """Wait until the planner, which has a thread of its own, has answered."""
        deadline_s = time.monotonic() + PLANNING_LIMIT_S
        while any(job.state == "planning" for job in self._open_jobs()):
            assert time.monotonic() < deadline_s, "no plans"
            time.sleep(0.002)

    def _open_jobs(self) -> list[JobView]:
        wanted = JobFilter(state=OPEN)
        return list(self._service.jobs("ann", wanted, after=None, limit=1000, newest_first=True)[0])

    # The load.

    def _plan_load(self) -> None:
        """Decide when everything happens: the last job can end before the month does, or pass into the next one."""
        span_s = next_month_ms(round(BEGIN_S * 1000)) / 1000 - BEGIN_S
        rng, load = self._rng, self.load
        for number in range(load.jobs):
            self._at(BEGIN_S + rng.uniform(60, 0.98 * span_s), lambda number=number: self._submit(number))
        for _ in range(load.price_changes):
            site = rng.choice(SITES)
            self._at(BEGIN_S + rng.uniform(0, span_s), lambda site=site: self._publish(site))
        kinds = (self._kill_agent, self._cut, self._kill_server, self._evict, self._cancel)
        for kind in kinds:
            for _ in range(load.faults):
                self._at(BEGIN_S + rng.uniform(0.05, 0.9) * span_s, kind)

    def _submit(self, number: int) -> None:
        rng = random.Random(f"{self.seed}/{number}")
        sites = rng.choice((1, 1, 2, 2, 3))
        name = f"job-{number}-{sites}-{rng.choice((1, 2, 3, 4))}"
        body = submission(f"key-{number}", name=name, max_restarts=9).model_dump_json(by_alias=True)
        job = str(self._call("POST", "/v1/jobs", "ann", body).json()["id"])
        self._wanted[job] = (rng.uniform(0.2, self.load.longest_h) * 3600, number)
        self.counts["jobs"] += 1

    def _publish(self, site: str) -> None:
        millionths = self._rng.randint(500_000, 4_000_000)
        price = {"cluster": site, "node_group": "g", "per_chip_hour": f"{millionths / 10**6:.6f}"}
        tariff = Tariff.model_validate({"currency": "EUR", "prices": [price]})
        self._call("POST", "/v1/tariffs", f"owner-{site}", tariff.model_dump_json(by_alias=True))
        self._owners.prices[site].append((int(self.now_s * 1000), millionths))
        self.counts["prices"] += 1

    def _on_start(self, site: str, folder: Path) -> None:
        """Decide, at the first worker of an attempt, when each site's check in and what becomes of them."""
        if "local" in folder.parts:  # an owner's own job, which ends when it is withdrawn
            return
        spec = WorkerFolder(folder).read_spec()
        key, (run_s, number) = (spec.run, spec.attempt), self._wanted[spec.run]
        rng = random.Random(f"{self.seed}/{number}/{spec.attempt}")
        if key not in self._owners.runs:
            sites = sorted({stage.cluster for stage in spec.plan.stages})
            checkin_s = {one: self.now_s + float(rng.randint(1, 90)) for one in sites}
            fails = spec.attempt == 1 and rng.random() < 0.15
            ends_s = max(checkin_s.values()) + round(run_s * (rng.random() if fails else 1))
            self._owners.runs[key] = ProgramRun(
                begun_s=self.now_s, checkin_s=checkin_s, ends_s=ends_s, status=1 if fails else 0
            )
            self.counts["programs failed"] += fails
            self.counts["attempts"] += 1
        found = self._owners.runs[key]
        address = WorkerAddress(rank=spec.rank, cluster=site, host="127.0.0.1", port=9000 + spec.rank)
        self._at(found.checkin_s[site], lambda: WorkerFolder(folder).write_checkin(address))
        self._at(found.ends_s, lambda: self._adapters[site].end(folder, found.status))

    # The faults.

    def _calm(self, do: Callable[[], None]) -> bool:
        """Return whether no attempt begins or ends now and all sites are there; else try again later.

        What is held at such moments is counted in `tests/control/test_ledger_histories.py` and `benchmarks.business`.
        """
        settled = all(job.state in ("waiting", "blocked", "running") for job in self._open_jobs())
        if settled and all(map(self._is_up, SITES)):
            return True
        self._at(self.now_s + self._rng.uniform(0.1, 1) * self.load.idle_s, do)
        return False

    def _kill_agent(self) -> None:
        if not self._calm(self._kill_agent):
            return
        site = self._rng.choice(SITES)
        del self._loops[site]
        self.counts["agents killed"] += 1
        self._at(self.now_s + self._rng.uniform(0.2, 4) * self.load.idle_s, lambda: self._start_agent(site))

    def _cut(self) -> None:
        if not self._calm(self._cut):
            return
        site = self._rng.choice(SITES)
        self._cut_off.add(site)
        self.counts["sites cut off"] += 1
        self._at(self.now_s + self._rng.uniform(0.2, 4) * self.load.idle_s, lambda: self._cut_off.discard(site))

    def _kill_server(self) -> None:
        self._start_server()
        self.counts["server killed"] += 1

    def _evict(self) -> None:
        """Let an owner take all cards of its site back for a job of its own, for some hours."""
        if not self._calm(self._evict):
            return
        number, machines = next(self._numbers), {site: loop.service.machine for site, loop in self._loops.items()}
        live = {
            site: [part.key for part in one.parts.values() if part.live and not part.local]
            for site, one in machines.items()
        }
        site = self._rng.choice([one for one in SITES if live[one]] or list(SITES))
        running = live[site]
        self._owners.evicted |= {(site, RecordedPart(*key)) for key in running}
        job = LocalJobFile(command=("own",), node_group="g", chips=CHIPS, level=POOL.cluster(site).priorities.levels[0])
        folder = submit_local_job(self.folder / site, f"own-{number}", job)
        self.counts["owners' own jobs"] += 1
        self.counts["parts evicted"] += len(running)
        self._at(self.now_s + 0.7 * self.load.idle_s, lambda: (folder / "cancel").touch())

    def _running_parts(self, site: str) -> list[tuple[str, int]]:
        parts = self._loops[site].service.machine.parts.values()
        return [part.key for part in parts if part.live and not part.local]

    def _cancel(self) -> None:
        running = [job for job in self._open_jobs() if job.state == "running"]
        if running and self._calm(self._cancel):
            self._call("POST", f"/v1/jobs/{self._rng.choice(running).id}/cancel", "ann")
            self.counts["jobs cancelled"] += 1

    # What each owner counts.

    def _compare(self) -> None:
        """Compare each owner's statement with what it counted, and check the ledger."""
        check = LedgerCheckView.model_validate(self._call("GET", "/v1/ledger/check", "root").json())
        if check.sum or check.unpaired or check.differences:
            self.differences.append(f"the ledger is out of balance: {check}")
        self.counts["entries"] = check.entries
        held = {site: read_records(RecordFiles(cards=self.folder / site / "cards")).intervals for site in SITES}
        self.counts["intervals"] = sum(map(len, held.values()))
        end_ms = next_month_ms(round(BEGIN_S * 1000))
        counted = self._owners.count(held, round(self.now_s * 1000), end_ms)
        for site in SITES:
            path = f"/v1/statements/owner/owner-{site}?month={MONTH}"
            found = StatementView.model_validate(self._call("GET", path, f"owner-{site}").json())
            own = round(counted[site] / MILLIONTHS_PER_CENT)
            exact = found.total_cents * MILLIONTHS_PER_CENT + found.carried_out_millionths
            self.cents[f"owner-{site}"] = round(exact / MILLIONTHS_PER_CENT), own
            # A job's remainder below a millionth is carried within the job.
            if abs(exact - counted[site]) > self.counts["attempts"] + 1 or round(exact / MILLIONTHS_PER_CENT) != own:
                self.differences.append(
                    f"owner-{site}: {exact} millionths by the statement, {float(counted[site])} counted"
                )
        self._compare_waits(SITES[0], held)

    def _compare_waits(self, site: str, held: Mapping[str, Sequence[HeldInterval]]) -> None:
        """Every job of the owner's user is in its statement, and trained no longer than owners held cards for it."""
        path = f"/v1/waits/owner-{site}?month={MONTH}&limit=1000"
        page = WaitedJobsPage.model_validate(self._call("GET", path, f"owner-{site}").json())
        ended_s = {
            job.id: job.changed_s
            for job in self._service.jobs("ann", JobFilter(), after=None, limit=1000, newest_first=True)[0]
        }
        held_s = Counter[tuple[str, str]]()
        for at, intervals in held.items():
            for one in intervals:
                held_s[one.part.job, at] += ((one.end_ms or round(self.now_s * 1000)) - one.begin_ms) / 1000
        if {one.job for one in page.jobs} != self._wanted.keys() or page.after is not None:
            self.differences.append(f"{len(page.jobs)} jobs waited, {len(self._wanted)} were submitted")
        for one in page.jobs:
            life_s = (self.now_s if one.open else ended_s[one.job]) - one.submitted_s
            most_s = max(held_s[one.job, at] for at in held)
            if abs(one.waited_s + one.ran_s - life_s) > 1 or one.ran_s > most_s + 1:
                self.differences.append(f"{one}: lived {life_s} s, held cards for {most_s} s")
        clusters = [cluster for cluster in POOL.clusters if cluster.name == site]
        self.waits = compare_waits(page, MONTH, clusters, POOL.links)
        if self.waits.compared + self.waits.never_alone + self.waits.unsized != len(page.jobs):
            self.differences.append(f"not all jobs are compared: {self.waits}")
