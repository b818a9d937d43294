"""`FaultyRun`: a run of random steps on a real Ray with seeded faults, and the rules that hold all the time.

Faults: requests and replies that are lost, a dashboard out of reach, agents that forget everything. A hold is asked for
again until it is granted or used up, as the agent does it. Whatever happens, no card is in two holds, no program runs
twice, and in the end nothing is left: no worker, no hold, no card in use.
"""

from __future__ import annotations

import random
import time
import uuid
from collections import Counter
from pathlib import Path

import httpx

from isthmus.agent.adapters.ray.ray_adapter import RayAdapter
from isthmus.agent.adapters.ray.ray_rest import RayRest
from isthmus.agent.adapters.scheduler_adapter import HoldRequest, RankNeed, RankStart
from isthmus.agent.courier.courier import Courier
from isthmus.core.errors import UnavailableError
from tests.ray.ray_cluster import RayCluster
from tests.ray.samples import adapter_of

PROGRAM = ("sh", "-c", 'echo started >> "$1/starts"; while :; do sleep 0.05; done', "worker")
HOLD_LIMIT_S = 60.0


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


class FaultyRun:
    """Holds and workers of one run of random steps; `steps` is its story, `problems` what broke a rule."""

    def __init__(self, ray: RayCluster, folder: Path, courier: Courier, state: Path, seed: int) -> None:
        self.ray, self.folder, self.rng, self._courier, self._state = ray, folder, random.Random(seed), courier, state
        self.transport = LossyTransport(self.rng, 0.1)
        self.wanted: dict[str, HoldRequest] = {}
        self.workers: dict[Path, str] = {}
        self.steps: list[str] = []
        self.problems: Counter[str] = Counter()
        self.num_faults, self.longest_hold_s = 0, 0.0
        self.forget()

    def forget(self) -> None:
        """Let another agent go on with what is on the disk."""
        rest = RayRest(self.ray.address, transport=self.transport)
        self.adapter: RayAdapter = adapter_of(self.ray, self._state, self._courier, PROGRAM, rest)

    def run(self, num_steps: int) -> None:
        """Do `num_steps` things at random, then give everything up."""
        try:
            for _ in range(num_steps):
                self.step()
            self.end()
        finally:
            self.transport.close()

    def step(self) -> None:
        """Do one thing at random; what Ray does not answer is done again later."""
        acts = (self.ask, self.ask, self.ask, self.release, self.start, self.start, self.stop, self.forget)
        act = self.kill if self.rng.random() < 0.2 else self.rng.choice(acts)
        self.steps.append(act.__name__)
        try:
            act()
            self.look()
        except UnavailableError as error:
            self.num_faults += 1
            self.steps.append(str(error))

    def ask(self) -> None:
        if len(self.wanted) < 3:
            need = RankNeed(node_group="h20", num_cards=self.rng.choice((1, 2)))
            hold_id = uuid.UUID(int=self.rng.getrandbits(128)).hex
            self.wanted[hold_id] = HoldRequest(id=hold_id, job="f", attempt=1, ranks=(need,), lease_s=HOLD_LIMIT_S)
        for request in list(self.wanted.values()):
            if self.rng.choice((self.adapter.hold, self.adapter.commit))(request).state == "ended":
                del self.wanted[request.id]

    def release(self) -> None:
        if self.wanted:
            hold_id = self.rng.choice(sorted(self.wanted))
            self.adapter.release(hold_id)
            del self.wanted[hold_id]

    def start(self) -> None:
        for request in list(self.wanted.values()):
            hold = self.adapter.hold(request)
            if hold.state == "granted":
                folder = self.folder / f"worker-{request.id}"
                folder.mkdir(exist_ok=True)
                self.workers[folder] = request.id
                self.adapter.start(RankStart(folder=folder, cards=hold.cards[0], hold=request.id))

    def stop(self) -> None:
        if self.workers:
            self.adapter.stop(self.rng.choice(sorted(self.workers)), force=self.rng.random() < 0.5)

    def kill(self) -> None:
        self.num_faults += 1
        self.ray.cut_dashboard()
        for folder in self.workers:
            self.adapter.poll(folder)
        self.ray.mend_dashboard()

    def look(self) -> None:
        """Check what must hold at any time."""
        cards = Counter(card for hold in self.adapter.observe().holds for rank in hold.cards for card in rank)
        self.problems["a card in two holds"] += any(num > 1 for num in cards.values())
        for folder in self.workers:
            starts = folder / "starts"
            self.problems["started twice"] += starts.exists() and len(starts.read_text().splitlines()) > 1

    def end(self) -> None:
        """Give everything up; nothing may be left, and no card may be in use for longer than a hold may last."""
        begun_s = time.monotonic()
        while not self._is_empty():
            if time.monotonic() - begun_s > HOLD_LIMIT_S:
                self.problems["left behind"] += 1
                break
            time.sleep(0.2)
        self.longest_hold_s = time.monotonic() - begun_s

    def _is_empty(self) -> bool:
        """Give up what is left; return whether nothing is."""
        try:
            for folder in self.workers:
                self.adapter.stop(folder, force=True)
            for hold_id in [*self.wanted, *(hold.id for hold in self.adapter.observe().holds)]:
                self.adapter.release(hold_id)
            left = [one.name for one in self.workers if self.adapter.poll(one).state != "exited"]
            return not left and not self.adapter.observe().holds and not self.ray.used_cards()
        except (UnavailableError, httpx.HTTPError) as error:
            self.steps.append(str(error))
            return False
