"""`Truth`: checks safety properties of a simulated pool against the processes that actually run.

No job runs in two attempts at once, no part starts twice, no site uses more devices than it has, and no
device is held longer than `LEAK_S` for a part that is no longer wanted.
"""

from __future__ import annotations

from isthmus.control.simulation.world import PoolWorld
from isthmus.control.state.job_records import ENDED
from isthmus.sim.kernel import Steps
from isthmus.site import CLAIMING, HOLDING, PartKey

LEAK_S = 60.0
"""Longest time that devices may be held for a part that is no longer wanted."""
LOOK_S = 2.0
"""Interval of the leak check."""


class Truth:
    """Observes a simulation; `problems` lists violations."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.longest_leak_s = 0.0
        self._running: dict[str, dict[tuple[str, int], int]] = {}
        self._unwanted: dict[tuple[str, PartKey], float] = {}
        self._world: PoolWorld | None = None

    def watch(self, world: PoolWorld) -> None:
        """Start to check `world` for leaked devices."""
        self._world = world
        world.kernel.start(self._look(world))

    def processes(self, site: str, key: PartKey, begins: bool) -> None:
        """Record that processes of a part have started (`begins`) or ended."""
        job, attempt = key
        if not attempt or self._world is None:
            return
        running_parts = self._running.setdefault(job, {})
        if not begins:
            running_parts.pop((site, attempt), None)
            return
        other = next((one for one in running_parts if one[1] != attempt), None)
        if other is not None:
            self._found(f"{job}: attempt {attempt} at {site} runs beside attempt {other[1]} at {other[0]}")
        running_parts[site, attempt] = 1
        if self._world.agents[site].scheduler.starts[key] > 1:
            self._found(f"{job}: attempt {attempt} was started twice at {site}")
        devices = self._world.agents[site].devices
        if any(num > devices.inventory[group] for group, num in devices.held.items()):
            self._found(f"{site} holds {devices.held} of {devices.inventory}")

    def _found(self, problem: str) -> None:
        now_s = self._world.kernel.now if self._world else 0.0
        self.problems.append(f"{now_s:.2f} s: {problem}")

    def _look(self, world: PoolWorld) -> Steps:
        while True:
            yield world.kernel.now + LOOK_S
            kept = {
                (name, part.key): part
                for name, agent in world.agents.items()
                for part in agent.parts.values()
                if not part.local and part.state in HOLDING | CLAIMING and not _wanted(world, name, part.key)
            }
            self._unwanted = {key: self._unwanted.get(key, world.kernel.now) for key in kept}
            for (site, key), since_s in self._unwanted.items():
                kept_s = world.kernel.now - since_s
                self.longest_leak_s = max(self.longest_leak_s, kept_s)
                if LEAK_S < kept_s <= LEAK_S + LOOK_S:
                    self._found(f"{site} holds devices of {key[0]}/{key[1]}, unwanted for {kept_s:.0f} s")


def _wanted(world: PoolWorld, site: str, key: PartKey) -> bool:
    job = world.server.coordinator.state.jobs.get(key[0])
    if job is None or job.state in ENDED:
        return False
    part = job.parts.get((key[1], site))
    return part is not None and part.desired != "released"
