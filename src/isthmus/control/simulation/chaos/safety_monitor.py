"""`SafetyMonitor`: checks safety properties of a simulated pool against the processes that actually run.

No job runs in two attempts at once, no part starts twice, no site uses more devices than it has, and no
device is held longer than `MAX_LEAK_S` for a part that is no longer wanted.
"""

from __future__ import annotations

from isthmus.control.simulation.pool_simulation import PoolSimulation
from isthmus.control.state.job_records import TERMINAL_STATES
from isthmus.sim import ProcessGenerator
from isthmus.site import CLAIMING, HOLDING, PartKey

MAX_LEAK_S = 60.0
"""Longest time that devices may be held for a part that is no longer wanted."""
CHECK_INTERVAL_S = 2.0
"""Interval of the leak check."""


class SafetyMonitor:
    """Observes a simulation; `problems` lists violations."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.longest_leak_s = 0.0
        self._running: dict[str, dict[tuple[str, int], int]] = {}
        self._unwanted_since_s: dict[tuple[str, PartKey], float] = {}
        self._simulation: PoolSimulation | None = None

    def attach(self, simulation: PoolSimulation) -> None:
        """Start to check `simulation` for leaked devices."""
        self._simulation = simulation
        simulation.kernel.start(self._check_leaks(simulation))

    def on_process(self, site: str, key: PartKey, begins: bool) -> None:
        """Record that processes of a part have started (`begins`) or ended."""
        job, attempt = key
        if not attempt or self._simulation is None:
            return
        running_parts = self._running.setdefault(job, {})
        if not begins:
            running_parts.pop((site, attempt), None)
            return
        other = next((one for one in running_parts if one[1] != attempt), None)
        if other is not None:
            self._add_problem(f"{job}: attempt {attempt} at {site} runs beside attempt {other[1]} at {other[0]}")
        running_parts[site, attempt] = 1
        if self._simulation.agents[site].scheduler.start_counts[key] > 1:
            self._add_problem(f"{job}: attempt {attempt} was started twice at {site}")
        devices = self._simulation.agents[site].devices
        held = devices.num_held()
        if any(num > devices.inventory[group] for group, num in held.items()):
            self._add_problem(f"{site} holds {held} of {devices.inventory}")

    def _add_problem(self, problem: str) -> None:
        now_s = self._simulation.kernel.now_s if self._simulation else 0.0
        self.problems.append(f"{now_s:.2f} s: {problem}")

    def _check_leaks(self, simulation: PoolSimulation) -> ProcessGenerator:
        while True:
            yield simulation.kernel.now_s + CHECK_INTERVAL_S
            kept = {
                (name, part.key): part
                for name, agent in simulation.agents.items()
                for part in agent.parts.values()
                if not part.local and part.state in HOLDING | CLAIMING and not _is_wanted(simulation, name, part.key)
            }
            self._unwanted_since_s = {key: self._unwanted_since_s.get(key, simulation.kernel.now_s) for key in kept}
            for (site, key), since_s in self._unwanted_since_s.items():
                kept_s = simulation.kernel.now_s - since_s
                self.longest_leak_s = max(self.longest_leak_s, kept_s)
                if MAX_LEAK_S < kept_s <= MAX_LEAK_S + CHECK_INTERVAL_S:
                    self._add_problem(f"{site} holds devices of {key[0]}/{key[1]}, unwanted for {kept_s:.0f} s")


def _is_wanted(simulation: PoolSimulation, site: str, key: PartKey) -> bool:
    job = simulation.server.coordinator.state.jobs.get(key[0])
    if job is None or job.state in TERMINAL_STATES:
        return False
    part = job.parts.get((key[1], site))
    return part is not None and part.desired != "released"
