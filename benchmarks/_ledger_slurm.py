"""The ledger beside the records of two real Slurm clusters, with slurmctld and the agents killed on the way.

A real server, two agents and two Slurm clusters, all processes. Jobs of one to three cards at one of the sites hold
them for some minutes each; their programs sleep. slurmctld and the agent of each site are killed at seeded times and
started again. At the end each owner's entries are compared with what Slurm itself wrote (`jobcomp/filetxt`), with the
log of slurmctld and the agent's record of cards, by `isthmus ledger compare`'s code.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.table import Row
from isthmus.cli.commands.accounting.compare_ledger import compare_ledger
from isthmus.client.api_client import ApiClient
from isthmus.control.placement import PlanRequest
from isthmus.control.server.run_server import ServerConfig, ServerInfo, run_server
from isthmus.control.state.coordinator_config import CoordinatorConfig
from isthmus.core.errors import ConflictError
from isthmus.core.owner.tariff import Tariff
from isthmus.core.plan import Plan, PlanSet, Refusal, Stage
from isthmus.core.pool import Pool
from isthmus.core.records.read_records import RecordFiles, read_records
from isthmus.core.views.ledger_views import LedgerEntry
from isthmus.core.views.records_view import RecordsView
from tests.control.processes import until
from tests.control.serving import submission
from tests.slurm.joint_pool import JointPool
from tests.slurm.slurm_cluster import SlurmCluster, slurm_clusters

SITES = ("east", "west")
PATIENT = CoordinatorConfig(reservation_timeout_s=1800, start_timeout_s=1800, agent_timeout_s=20)
"""All jobs are submitted at once, and each site asks Slurm for one allocation after the other."""
FINAL_STATES = ("succeeded", "failed", "cancelled", "lost")
MAX_PERCENT = 0.1
_SLEEP = """
for f; do :; done
r=${f##*rank-}; c=${f%/runs/*}; c=${c##*/}
s=$(sed -n 's/.*"steps": *\\([0-9]*\\).*/\\1/p' "$f/spec.json" | head -1)
echo "{\\"rank\\":$r,\\"cluster\\":\\"$c\\",\\"host\\":\\"127.0.0.1\\",\\"port\\":$((9000 + r))}" > "$f/c.tmp"
mv "$f/c.tmp" "$f/checkin.json"
until [ -e "$f/ranks.json" ]; do sleep 0.5; done
sleep "$s"
"""
SLEEPER = ("sh", "-c", _SLEEP, "sleeper")
"""A worker that checks in, waits for the others, sleeps as many seconds as its job has steps, and ends well."""


@dataclass(frozen=True, kw_only=True)
class SlurmAmount:
    """How much is done: jobs, nodes and cards of each cluster, seconds that a job holds, kills of each daemon."""

    jobs: int = 500
    nodes: int = 16
    cards: int = 16
    least_s: int = 900
    most_s: int = 1200
    kills: int = 3
    limit_s: float = 3600.0


QUICK = SlurmAmount(jobs=8, nodes=1, cards=4, least_s=8, most_s=12, kills=1, limit_s=240.0)


def plan_at_one_site(asked: PlanRequest) -> PlanSet:
    """Plan a stage of one card for each card of the job, at the site with the most free cards."""
    wanted = int(asked.job.name.rpartition("-")[2])
    free = {name: sum(groups.values()) for name, groups in asked.free_chips.items()}
    site = max(sorted(free), key=lambda name: free[name])
    if free[site] < wanted:
        return PlanSet(plans=(), refused=(Refusal(clusters=tuple(free), reason="no free cards"),))
    stages = tuple(
        Stage(cluster=site, node_group="h20", layers=(at, at + 1 if at + 1 < wanted else 4)) for at in range(wanted)
    )
    return PlanSet(plans=(Plan(id="p", stages=stages, micro_batches=4, micro_batch_size=1, sequence_length=8),))


def serve_planned(state: Path, port: int, pool: Pool) -> None:
    """Be a server with this planner that notes its URL in `<state>/url`."""

    def announce(listening: ServerInfo) -> None:
        (state / "url.tmp").write_text(listening.url)
        (state / "url.tmp").replace(state / "url")

    run_server(ServerConfig(state=state, port=port, pool=pool, rules=PATIENT), announce, planner=plan_at_one_site)


class LedgerPool(JointPool):
    """The pool; its server plans each job at one site, at once."""

    def start_server(self, _crash: tuple[str, int] = ("", 0)) -> None:
        """Start the server."""
        url = self.folder / "server" / "url"
        url.unlink(missing_ok=True)
        self._launch("server", serve_planned, self.folder / "server", self.port, self.pool)
        until(url.exists, "the server listens", 120)
        self.url = url.read_text()
        self.port = int(self.url.rpartition(":")[2])


def compare_slurms(amount: SlurmAmount, seed: int) -> tuple[dict[str, RecordsView], Counter[str]]:
    """Run the jobs; return the comparison of each site, and counts of jobs and kills."""
    rng = random.Random(seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        slurm_clusters(Path(folder), amount.nodes, amount.cards, *SITES) as slurms,
    ):
        (Path(folder) / "pool").mkdir()
        pool = LedgerPool(Path(folder) / "pool", slurms, SLEEPER)
        try:
            return _run(pool, slurms, amount, rng)
        finally:
            for site in SITES:
                pool.end(site)
            pool.close()


def _run(
    pool: LedgerPool, slurms: dict[str, SlurmCluster], amount: SlurmAmount, rng: random.Random
) -> tuple[dict[str, RecordsView], Counter[str]]:
    capacity = amount.nodes * amount.cards
    until(lambda: pool.free() == dict.fromkeys(SITES, capacity), "both sites have joined", 240)
    _publish(pool)
    counts, jobs = Counter[str](), list[str]()
    for number in range(amount.jobs):
        chips = rng.choice((1, 1, 1, 2, 3))
        jobs.append(_submit(pool, number, chips, rng.randint(amount.least_s, amount.most_s)))
    began_s, expected_s = time.monotonic(), _expected_s(amount)
    faults = sorted(
        (rng.uniform(0.1, 0.8) * expected_s, kind, site)
        for kind in ("slurmctld", "agent") for site in SITES for _ in range(amount.kills)
    )  # fmt: skip
    ended: Counter[str] = Counter()
    while time.monotonic() - began_s < amount.limit_s:
        while faults and time.monotonic() - began_s >= faults[0][0]:
            _, kind, site = faults.pop(0)
            _strike(pool, slurms[site], kind, site, rng)
            counts[f"{kind} killed"] += 1
        for slurm in slurms.values():
            slurm.revive_controller()
        ended = _ended(pool, jobs)
        print(
            f"{time.monotonic() - began_s:.0f} s: {dict(ended)}, {len(faults)} faults to come",
            file=sys.stderr,
            flush=True,
        )
        if not ended["open"] and not faults:
            break
        time.sleep(2 if amount.jobs < 50 else 10)
    with ApiClient(pool.url, pool.user) as client:
        for job in client.jobs():
            if job.state not in FINAL_STATES:
                with contextlib.suppress(ConflictError):  # it has ended meanwhile
                    client.cancel(job.id)
    until(lambda: pool.free() == dict.fromkeys(SITES, capacity), "all cards are back", 600)
    counts.update({f"jobs {state}": num for state, num in ended.items()})
    month = datetime.now(UTC).strftime("%Y-%m")
    return {site: _compared(pool, slurms[site], site, month) for site in SITES}, counts


def _expected_s(amount: SlurmAmount) -> float:
    """Return about how long the jobs take on all cards."""
    waves = max(1.0, amount.jobs * 1.6 / (2 * amount.nodes * amount.cards))
    return waves * (amount.least_s + amount.most_s) / 2 + 10


def _publish(pool: LedgerPool) -> None:
    prices = [
        {"cluster": site, "node_group": "h20", "per_chip_hour": price}
        for site, price in zip(SITES, ("2.40", "1.75"), strict=True)
    ]
    tariff = Tariff.model_validate({"currency": "EUR", "prices": prices})
    with ApiClient(pool.url, pool.admin_token()) as client:
        client.publish_tariff(tariff)


def _submit(pool: LedgerPool, number: int, chips: int, hold_s: int) -> str:
    """Submit a job that holds `chips` cards for about `hold_s`."""
    training = {"steps": hold_s, "sequence_length": 8, "micro_batch_size": 1, "global_batch_size": 4}
    body = submission(
        f"job-{number}", name=f"j{number}-{chips}", training=training, output=str(pool.folder / "out" / "{job}")
    )
    answer = pool.call("POST", "/v1/jobs", body.model_dump(mode="json"))
    if answer is None or answer.status_code != 201:
        raise RuntimeError(f"job {number} was not accepted: {answer.text if answer else 'no answer'}")
    return str(answer.json()["id"])


def _strike(pool: LedgerPool, slurm: SlurmCluster, kind: str, site: str, rng: random.Random) -> None:
    """Kill a daemon of a site, and start it again some seconds later."""
    away_s = rng.uniform(0.5, 8)
    if kind == "slurmctld":
        slurm.kill_controller()
        time.sleep(away_s)
        slurm.start_controller()
    else:
        pool.kill(site)
        time.sleep(away_s)
        pool.start(site)


def _ended(pool: LedgerPool, jobs: list[str]) -> Counter[str]:
    """Return how many jobs are in which final state; all others are open."""
    found: Counter[str] = Counter()
    with ApiClient(pool.url, pool.user) as client:
        states = {job.id: job.state for job in client.jobs()}
    for job in jobs:
        state = states.get(job, "lost")
        found[state if state in FINAL_STATES else "open"] += 1
    return found


def _compared(pool: LedgerPool, slurm: SlurmCluster, site: str, month: str) -> RecordsView:
    logs = slurm.root / "log"
    files = RecordFiles(cards=pool.folder / site / "cards", slurm=logs / "jobcomp.txt", slurmctld_log=logs / "ctld.log")
    with ApiClient(pool.url, pool._owners[site]) as client:
        return compare_ledger(list(_entries(client)), read_records(files), site, month)


def _entries(client: ApiClient) -> Iterator[LedgerEntry]:
    after: int | None = 0
    while after is not None:
        page = client.ledger(after=after)
        yield from page.entries
        after = page.after


def rows(amount: SlurmAmount, seed: int) -> list[Row]:
    """Return the figures of a run."""
    found, counts = compare_slurms(amount, seed)
    killed = f"slurmctld killed {counts['slurmctld killed']} times, agents {counts['agent killed']} times"
    what = f"{amount.jobs} jobs of {amount.least_s} to {amount.most_s} s on two Slurm clusters, {killed}"
    ours = sum(one.ours_chip_hours for one in found.values())
    theirs = sum(one.theirs_chip_hours for one in found.values())
    percent = 100 * abs(ours - theirs) / theirs if theirs else 100.0
    unknown = sum(one.unexplained for one in found.values())
    causes: dict[str, tuple[int, float]] = {}
    for view in found.values():
        for one in view.causes:
            num, hours = causes.get(one.cause, (0, 0.0))
            causes[one.cause] = num + one.differences, hours + one.chip_hours
        for part in view.parts:
            if any(one.cause in ("unknown", "killed daemon") for one in part.differences):
                print(view.site, part.model_dump_json(), file=sys.stderr)
    return [
        Row(what=f"{what}: ledger against Slurm's record ({ours:.4f} and {theirs:.4f} chip-hours)", ours=percent,
            unit="%", target=f"at most {MAX_PERCENT:g}", met=percent <= MAX_PERCENT),
        Row(what=f"{what}: differences without a cause", ours=float(unknown), unit="", target="0", met=not unknown),
        *(Row(what=f"{what}: differences by {cause}: {hours:+.4f} chip-hours", ours=float(num), unit="")
          for cause, (num, hours) in sorted(causes.items())),
        Row(what=f"{what}: parts compared", ours=float(sum(len(one.parts) for one in found.values())), unit=""),
        Row(what=f"{what}: jobs that ended well", ours=float(counts["jobs succeeded"]), target=str(amount.jobs),
            unit="", met=counts["jobs succeeded"] == amount.jobs),
    ]  # fmt: skip
