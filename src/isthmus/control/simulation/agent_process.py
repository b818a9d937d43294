"""`AgentProcess`: the loop of a simulated site's agent, and the processes that it has started.

It reports when there is news or when it is due to hear, obeys what it is answered, and sees what becomes of
its processes. When it dies it loses its memory and keeps its table; processes outlive it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from isthmus.control.simulation.delays import Delays
from isthmus.control.simulation.faults import Faults
from isthmus.control.simulation.lies import lie
from isthmus.control.simulation.runs import Runs
from isthmus.control.simulation.scheduler import LocalScheduler, Work
from isthmus.control.simulation.server import SimulatedServer
from isthmus.control.simulation.site import UNSAVED_STEP_S, SimulatedSite
from isthmus.control.simulation.site_parts import Act, LocalJob, PartKey, SitePart
from isthmus.core.messages import AgentOrders, AgentReport, Protection
from isthmus.sim.kernel import Kernel

_LATE_S = 1e-3
"""So much after it is due is time looked at: sums of floats may fall short of each other."""

_RENEW_S = 2.0
"""Between two reports while cards are held under a lease and nothing else happens."""


class AgentProcess:
    """One agent. `local` is told of every local job that starts (None), is preempted (-1) or ended (status),
    `processes` of everything that begins (True) and ends (False) to run here.

    Unless it has `joined` the pool it talks to nobody. `lies` and `slow` say what its owner is like.
    """

    def __init__(
        self,
        kernel: Kernel,
        site: SimulatedSite,
        server: SimulatedServer,
        runs: Runs,
        delays: Delays,
        faults: Faults,
        local: Callable[[str, str, int | None], None] = lambda *_: None,
        *,
        processes: Callable[[str, PartKey, bool], None] = lambda *_: None,
        joined: bool = True,
    ) -> None:
        self._kernel, self.site, self._server, self._runs = kernel, site, server, runs
        self._delays, self._faults, self._local = delays, faults, local
        self._processes = processes
        self.name = site.cluster.name
        self.scheduler = LocalScheduler(faults)
        self.lies = faults.strikes("lying owner")
        self.slow = faults.strikes("slow owner")
        self.dead_until_s = self.cut_until_s = 0.0
        self._life, self._exchanges, self._talking = 1, 0, False
        self._visit_at_s: float | None = None
        self._wake_at_s: float | None = None
        self._weigh_at_s = 0.0
        self._told = -1
        self._joined = joined
        self.poke(0.0)

    @property
    def reachable(self) -> bool:
        """Whether the server would hear it now."""
        now_s = self._kernel.now
        return now_s >= self.dead_until_s and now_s >= self.cut_until_s

    def poke(self, pause_s: float) -> None:
        """Have it report in `pause_s`, or earlier if it will anyway."""
        at_s = self._kernel.now + pause_s
        if self._joined and (self._visit_at_s is None or at_s < self._visit_at_s):
            self._visit_at_s = at_s
            self._kernel.call(at_s, self._visit, at_s)

    def submit(self, job: LocalJob) -> None:
        """Take a job of the site's own users in."""
        self._do(self.site.submit(job, self._kernel.now))

    def withdraw(self, name: str) -> None:
        """Let go of a local job."""
        self._do(self.site.withdraw(name, self._kernel.now))

    def part_ended(self, key: PartKey, status: int, *, peer: bool = False) -> None:
        """Processes of a part end by themselves."""
        if self._end(key, status, peer=peer):
            self._see(key)

    def part_saved(self, key: PartKey, checkpoint: Protection) -> None:
        """Every rank of a part has verified a checkpoint."""
        if self._kernel.now >= self.dead_until_s:
            self._do(self.site.saved(key, checkpoint, self._kernel.now))

    def die(self) -> None:
        """Lose the process: its memory is gone, its table and its workers are not."""
        self._life += 1
        self._talking = False
        self.dead_until_s = self._kernel.now + self._faults.between(0.5, 8.0)
        self.scheduler.forget_all()
        self._kernel.call(self.dead_until_s, self._boot, self._life)

    def _boot(self, life: int) -> None:
        if life != self._life:
            return
        self._do(self.site.wake(self._kernel.now))
        for key in list(self.site.parts):
            self._see(key)
        self._told = -1
        self.poke(0.0)

    def _visit(self, at_s: float) -> None:
        if at_s != self._visit_at_s:
            return
        self._visit_at_s = None
        if self._kernel.now < self.dead_until_s:
            return
        if self._talking:
            self.poke(self._delays.quick_s)
            return
        self._talking = True
        self._exchanges += 1
        if self._kernel.now >= self._weigh_at_s:
            self._weigh_at_s = self._kernel.now + UNSAVED_STEP_S
            for part in self.site.parts.values():
                if part.state == "running" and not part.local:
                    self.site.unsaved(part, self._runs.unsaved_s(part.job, part.attempt))
        self._told = self.site.books.news
        report = self.site.report(f"{self.name}-{self._life}")
        if self.lies and self._faults.on:
            report = lie(report, self.site, self._faults)
        self._send(report)

    def _send(self, report: AgentReport) -> None:
        """Send a report; it may be lost, come twice, or come long after others."""
        faults, travel_s = self._faults, self._travel_s()
        ticket = self._life, self._exchanges
        self._kernel.call(self._kernel.now + self._delays.retry_s + 2 * travel_s, self._give_up, ticket)
        if faults.strikes("partition"):
            self.cut_until_s = self._kernel.now + faults.between(1.0, 20.0)
        if faults.strikes("late report"):
            self._kernel.call(self._kernel.now + faults.between(1.0, 20.0), self._arrive_again, report)
        if faults.strikes("lost report"):
            return
        self._kernel.call(self._kernel.now + travel_s, self._arrive, (report, ticket, travel_s))
        if faults.strikes("doubled report"):
            self._kernel.call(self._kernel.now + 2 * travel_s, self._arrive_again, report)

    def _travel_s(self) -> float:
        slow = self.slow and self._faults.on
        return self._delays.network_s * (self._faults.between(5, 60) if slow else 1.0)

    def _arrive_again(self, report: AgentReport) -> None:
        """A report comes for the second time, or late: nobody waits for the answer."""
        if self._kernel.now >= self.cut_until_s:
            self._server.exchange(report)

    def _arrive(self, sent: tuple[AgentReport, tuple[int, int], float]) -> None:
        report, ticket, travel_s = sent
        if self._kernel.now < self.cut_until_s:
            return
        orders = self._server.exchange(report)
        if orders is not None and not self._faults.strikes("lost reply"):
            self._kernel.call(self._kernel.now + travel_s, self._answered, (orders, ticket))

    def _give_up(self, ticket: tuple[int, int]) -> None:
        """No answer came: try again."""
        if self._talking and ticket == (self._life, self._exchanges):
            self._talking = False
            self.poke(0.0)

    def _answered(self, answer: tuple[AgentOrders, tuple[int, int]]) -> None:
        orders, ticket = answer
        if ticket != (self._life, self._exchanges) or self._kernel.now < self.dead_until_s:
            return
        self._talking = False
        if self._faults.strikes("agent dies before it saves"):
            self.die()
            return
        acts = self.site.obey(orders, self._kernel.now)
        if acts and self._faults.strikes("agent dies between saving and acting"):
            self.die()
            return
        self._do(acts)
        if any(self.site.books.leased(part) for part in self.site.books.restless.values()):
            self.poke(_RENEW_S)
        elif self._delays.beat_s < math.inf:
            self.poke(self._delays.beat_s)

    def _do(self, acts: Iterable[Act]) -> None:
        """Carry out what the site asks for; have it report if there is news, and look when time is due."""
        for act in acts:
            part = act.part
            if act.what == "start":
                self._start(part)
            elif act.what == "stop":
                stop_s, status = (0.0, 137) if act.force else (self._delays.stop_s, 143)
                work = self.scheduler.find(part.key) or self.scheduler.bar(part.key)
                self._kernel.call(self._kernel.now + stop_s, self._stop, (work, status))
            elif act.what == "ranks" and part.plan is not None:
                self._runs.ready(self.name, part.job, part.attempt, part.plan.clusters)
            elif act.what == "protect":
                self._runs.protect(self.name, part.job, part.attempt)
        if self.site.books.news != self._told:
            self.poke(self._delays.quick_s)
        next_s = self.site.next_s
        if next_s is not None and (self._wake_at_s is None or next_s < self._wake_at_s):
            self._wake_at_s = max(next_s, self._kernel.now) + _LATE_S
            self._kernel.call(self._wake_at_s, self._pass_time, self._wake_at_s)

    def _pass_time(self, at_s: float) -> None:
        if at_s != self._wake_at_s:
            return
        self._wake_at_s = None
        if self._kernel.now >= self.dead_until_s:
            self._do(self.site.pass_time(self._kernel.now))

    def _start(self, part: SitePart) -> None:
        key = part.key
        check_in_s = self._kernel.now + self._delays.check_in_s
        if not self.scheduler.start(key, check_in_s):
            return
        self._processes(self.name, key, True)
        if part.local:
            self._local(self.name, part.job, None)
        else:
            self._kernel.call(check_in_s, self._see, key)

    def _stop(self, asked: tuple[Work, int]) -> None:
        """End what was asked to end; of a name that was used again since, the new work goes on."""
        work, status = asked
        key = work.key
        if self.scheduler.find(key) is work:
            if self._end(key, status) and key[1]:
                self._runs.lost(self.name, key[0], key[1])
            self._see(key)

    def _end(self, key: PartKey, status: int, *, peer: bool = False) -> bool:
        ended = self.scheduler.end(key, status, peer=peer)
        if ended:
            self._processes(self.name, key, False)
        return ended

    def fail(self, key: PartKey) -> None:
        """A node that the part runs on fails."""
        work = self.scheduler.find(key)
        if work is not None:
            self._stop((work, 1))

    def _see(self, key: PartKey) -> None:
        """Look at the processes of a part, as the agent does; nobody looks while it is dead."""
        now_s = self._kernel.now
        part, work = self.site.parts.get(key), self.scheduler.find(key)
        if now_s < self.dead_until_s or part is None or work is None or not part.live:
            return
        if work.state == "running":
            if not part.local and now_s >= work.checked_in_s:
                self._do(self.site.checked_in(key, now_s))
            return
        if part.local:
            self.scheduler.forget(key)
            status = -1 if part.requeue else work.status
            self._local(self.name, key[0], status)
            self._do(self.site.exited(key, work.status, now_s))
            return
        self._do(self.site.exited(key, work.status, now_s, "peer" if work.peer else "own"))
