"""`FaultyRun`: random steps on a real Ray with seeded faults.

Faults: requests and replies that are lost, a dashboard out of reach, agents that forget everything. In the end there is
no worker, no hold, no card in use.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import httpx

from isthmus.agent.adapters.ray.ray_rest import RayRest
from isthmus.agent.adapters.scheduler_adapter import SchedulerAdapter
from isthmus.agent.courier.courier import Courier
from isthmus.core.errors import UnavailableError
from tests.agent.faulty_holds import PROGRAM, FaultyHolds
from tests.ray.ray_cluster import RayCluster
from tests.ray.samples import adapter_of


class LossyTransport(httpx.BaseTransport):
    """The network to Ray, which loses requests and replies by a seed; `num_lost` counts them."""

    def __init__(self, rng: random.Random, loss_share: float) -> None:
        self._inner, self._rng, self._loss_share = httpx.HTTPTransport(), rng, loss_share
        self.num_lost = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        fate = self._rng.random()
        if fate < self._loss_share:
            self.num_lost += 1
            raise httpx.ConnectTimeout("the request is lost", request=request)
        answer = self._inner.handle_request(request)
        if fate < 2 * self._loss_share:
            answer.read()
            answer.close()
            self.num_lost += 1
            raise httpx.ReadTimeout("the reply is lost", request=request)
        return answer

    def close(self) -> None:
        self._inner.close()


class FaultyRun(FaultyHolds):
    """One run on a Ray cluster; what Ray does not answer counts as a fault."""

    NEEDS = ((1, 1), (2, 1))
    SETTLE_S = 60.0
    ERRORS = (UnavailableError, httpx.HTTPError)

    def __init__(self, ray: RayCluster, folder: Path, courier: Courier, state: Path, seed: int) -> None:
        self.ray, self._courier, self._state, self.num_faults = ray, courier, state, 0
        self.transport = LossyTransport(random.Random(f"losses {seed}"), 0.1)
        super().__init__(folder, seed)

    def run(self, num_steps: int) -> None:
        """Do `num_steps` things at random, then give everything up."""
        try:
            for _ in range(num_steps):
                self.step(self.kill if self.rng.random() < 0.2 else None)
            self.end()
        finally:
            self.transport.close()

    def step(self, act: Callable[[], None] | None = None) -> bool:
        answered = super().step(act)
        self.num_faults += not answered
        return answered

    def acts(self) -> tuple[Callable[[], None], ...]:
        return self.ask, self.ask, self.ask, self.release, self.start, self.start, self.stop, self.forget

    def new_adapter(self) -> SchedulerAdapter:
        rest = RayRest(self.ray.address, transport=self.transport)
        return adapter_of(self.ray, self._state, self._courier, PROGRAM, rest)

    def stop(self) -> None:
        if self.workers:
            self.adapter.stop(self.rng.choice(sorted(self.workers)), force=self.rng.random() < 0.5)

    def kill(self) -> None:
        self.num_faults += 1
        self.ray.cut_dashboard()
        for folder in self.workers:
            self.adapter.poll(folder)
        self.ray.mend_dashboard()

    def left(self) -> object:
        return self.ray.used_cards()

    def is_empty(self) -> bool:
        """A worker counts as ended only when Ray says so."""
        return super().is_empty() and all(self.adapter.poll(one).state == "exited" for one in self.workers)
