"""`KilledJobs`: jobs that an agent has accepted, a slurmctld that is killed within 2 s of that, and what follows.

slurmctld saves its state some seconds after it has acknowledged a job, so it forgets what it accepted last. A job that
its site reports as ended gets another attempt, as the server orders it. Beside them plain jobs of `sbatch`.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import time
from collections import Counter
from pathlib import Path

import psutil

from isthmus.core.errors import UnavailableError
from isthmus.core.messages.agent_messages import AgentOrders, PartOrder
from tests.site.samples import order
from tests.slurm.running_agent import RunningAgent
from tests.slurm.slurm_cluster import SlurmCluster

PROGRAM = ("sh", "-c", 'echo started >> "$1/starts"; while :; do sleep 0.5; done', "worker")
MOST_S, LIMIT_S, STABLE_S = 2.0, 300.0, 6.0
PLAIN_TRIES = 5
ENDED = ("failed", "refused", "released", "succeeded")


class KilledJobs:
    """One kill of slurmctld under `num_jobs` jobs of one card, at random by `seed`.

    Kills of one Slurm share the agent's state folder beside `folder`: slurmctld may show released jobs again.
    """

    def __init__(self, slurm: SlurmCluster, folder: Path, seed: int, num_jobs: int = 20) -> None:
        folder.mkdir()
        self._slurm, self._rng, self._runs = slurm, random.Random(seed), folder.parent / "state" / "runs"
        self._agent = RunningAgent(slurm, folder.parent / "state", PROGRAM)
        self._attempts = {f"k{seed}-{number}": 1 for number in range(num_jobs)}
        self.num_lost = self.num_doubled = self.num_restarted = self.num_plain_lost = 0
        self.release_s = self.recovery_s = self._stable_since_s = 0.0
        self.story = ""

    def run(self, *, with_plain_jobs: bool = False) -> None:
        """Accept the jobs, kill slurmctld, see what they are, and give them up."""
        agent, num = self._agent, len(self._attempts)
        agent.until("cards are seen", lambda: agent.service.machine.free_chips().get("h20", 0) >= num)

        def are_accepted() -> bool:
            return all(agent.state(job, attempt) == "prepared" for job, attempt in self._attempts.items())

        assert self._until(are_accepted, starts=False), agent.states
        plain = [self._submit_plain() for _ in range(num if with_plain_jobs else 0)]
        killed_s = time.monotonic() + self._rng.uniform(0, MOST_S)
        while time.monotonic() < killed_s:
            self._drive(starts=True)
        self._slurm.kill_controller()
        begun_s = time.monotonic()
        self._slurm.start_controller()
        self._slurm.wait_answer()
        self.num_plain_lost = self._plain_lost(plain)
        self._stable_since_s = time.monotonic()
        if not self._until(self._is_stable, starts=True):
            self.num_lost = sum(not self._runs_once(job) for job in self._attempts)
        self.recovery_s = self._stable_since_s - begun_s
        self.num_doubled = sum(self._is_doubled(job) for job in self._attempts)
        self.story = f"{agent.states}, attempts {self._attempts}"
        self._give_up()

    def _submit_plain(self) -> str:
        """Submit a job of the comparison until slurmctld accepts it; return its name."""
        name = f"plain-{self._rng.getrandbits(64):x}"
        command = ("sbatch", "--hold", f"--job-name={name}", "-o", "/dev/null", "--wrap", "true")
        for _ in range(PLAIN_TRIES):
            # sbatch has died of SIGPIPE on a busy machine: it had no answer.
            with contextlib.suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
                self._slurm.run(*command)
                return name
        raise UnavailableError(f"slurmctld took no job of sbatch in {PLAIN_TRIES} tries")

    def _plain_lost(self, names: list[str]) -> int:
        kept = set(self._slurm.run("squeue", "-h", "-o", "%j").split())
        return sum(name not in kept for name in names)

    def _drive(self, *, starts: bool) -> None:
        """Tick once, and order what the server would: a job whose part has ended gets another attempt."""
        self._slurm.revive_controller()
        self._agent.service.tick()
        orders: list[PartOrder] = []
        for job, attempt in self._attempts.items():
            state, desired = self._agent.state(job, attempt), "prepared"
            if state in ENDED:
                desired = "released"
            elif state == "running" or (starts and state == "prepared"):
                desired = "running"
            orders.append(order(desired, job=job, attempt=attempt, places=("east/h20",)))  # type: ignore[arg-type]
            if state == "released":
                self._attempts[job] += 1
                self.num_restarted += 1
        self._agent.service.apply_orders(AgentOrders(parts=tuple(orders)))
        time.sleep(0.05)

    def _until(self, happened, *, starts: bool) -> bool:
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            self._drive(starts=starts)
            if happened():
                return True
        return False

    def _is_stable(self) -> bool:
        """Return whether every job has run for some looks at Slurm."""
        now_s = time.monotonic()
        if not all(self._runs_once(job) for job in self._attempts):
            self._stable_since_s = now_s
        return now_s - self._stable_since_s >= STABLE_S

    def _runs_once(self, job: str) -> bool:
        folder = self._folder(job)
        is_running = self._agent.state(job, self._attempts[job]) == "running"
        return (
            is_running and (folder / "starts").exists() and self._agent.service.adapter.poll(folder).state == "running"
        )

    def _is_doubled(self, job: str) -> bool:
        """Return whether a folder was started twice, or programs of two attempts run."""
        starts = [file.read_text().count("\n") for file in (self._runs / job).glob("*/rank-*/starts")]
        attempts = Counter[str]()
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if words[:1] == ["sh"] and words[-2:-1] == ["worker"] and f"/runs/{job}/" in words[-1]:
                attempts[Path(words[-1]).parent.name] += str(self._runs) in words[-1]
        return any(num > 1 for num in starts) or len(+attempts) > 1

    def _folder(self, job: str) -> Path:
        return self._runs / job / str(self._attempts[job]) / "rank-0"

    def _give_up(self) -> None:
        """Release everything, and measure until Slurm has every card back."""
        self._slurm.run("scancel", "--user=root", "--state=PENDING")
        begun_s = time.monotonic()
        self._agent.service.shut_down()
        self._agent.until("all is released", lambda: self._agent.service.stopped, timeout_s=LIMIT_S)
        self._slurm.wait_empty()
        self.release_s = time.monotonic() - begun_s
