"""The paths that a site asks of the decision centre follow from its parts, through errors, refusals and restarts."""

from __future__ import annotations

from pathlib import Path

from isthmus.agent.service.scheduler_calls import SchedulerCalls
from isthmus.agent.service.site_paths import SitePaths
from isthmus.core.errors import UnavailableError
from isthmus.site import PathObserved, SiteEvent
from isthmus.site.parts import SitePart
from isthmus.wan import LoggedCentre, PathRequest, PathState
from isthmus.wan.centre.centre_requests import AskMessage, LookMessage, NameMessage
from isthmus.wan.control.wan_topology import WanTopology
from tests.agent.test_promised_rates import part


class LocalClient:
    """A client of a centre in this process; `is_down`: it does not answer."""

    def __init__(self, folder: Path) -> None:
        pipe = {"name": "line", "from": "east", "to": "west", "capacity_gbps": 1}
        self.centre = LoggedCentre(WanTopology.model_validate({"pipes": [pipe]}), folder)
        self.now_s, self.is_down = 0.0, False

    def _handle(self, message: AskMessage | NameMessage | LookMessage) -> PathState:
        if self.is_down:
            raise UnavailableError("the decision centre does not answer")
        return self.centre.handle(message, self.now_s)

    def ask(self, request: PathRequest) -> PathState:
        return self._handle(AskMessage(request=request))

    def confirm(self, name: str) -> PathState:
        return self._handle(NameMessage(kind="confirm", name=name))

    def renew(self, name: str) -> PathState:
        return self._handle(NameMessage(kind="renew", name=name))

    def release(self, name: str) -> PathState:
        return self._handle(NameMessage(kind="release", name=name))

    def look(self, name: str) -> PathState:
        return self._handle(LookMessage(name=name))


class Paths:
    """`SitePaths` of east over a `LocalClient`, with a clock."""

    def __init__(self, folder: Path) -> None:
        self.client, self.seen = LocalClient(folder), list[PathObserved]()
        self.paths = SitePaths(self.client, SchedulerCalls(blocks=False), "east", self.observe)  # type: ignore[arg-type]

    def observe(self, event: SiteEvent) -> None:
        assert isinstance(event, PathObserved)
        self.seen.append(event)

    def at(self, now_s: float, *parts: SitePart) -> list[str]:
        """Reconcile at a time; return what the site learnt."""
        self.client.now_s, self.seen = now_s, []
        self.client.centre.advance(now_s)
        self.paths.reconcile(parts, now_s)
        return [one.state for one in self.seen]

    def state(self, name: str = "a.1.west") -> str:
        """Return the centre's own word."""
        return self.client.look(name).state


def test_a_path_is_held_confirmed_and_given_back_with_its_part(tmp_path: Path) -> None:
    """Prepare, commit and release, as the part is prepared, runs and ends."""
    site = Paths(tmp_path)
    assert site.at(0.0, part(state="evicting", path="asked")) == ["held"]
    assert site.state() == "held"
    site.at(1.0, part(state="running", path="held"))
    assert site.state() == "booked"
    site.at(500.0, part(state="running", path="held"))
    assert site.state() == "booked"
    site.at(501.0)
    assert site.state() == "unknown"
    assert site.paths.settled


def test_a_held_path_is_renewed_while_its_part_waits(tmp_path: Path) -> None:
    """A joint start may take longer than the centre keeps what is not renewed."""
    site = Paths(tmp_path)
    for now_s in range(0, 200, 5):
        site.at(float(now_s), part(state="prepared", path="held"))
    assert site.state() == "held"


def test_an_aborted_part_gives_its_path_back(tmp_path: Path) -> None:
    """What is held for no part is released at once, and again until the centre has answered."""
    site = Paths(tmp_path)
    site.at(0.0, part(state="evicting", path="asked"))
    site.client.is_down = True
    site.at(1.0)
    assert not site.paths.settled
    site.client.is_down = False
    site.at(2.0)
    assert site.paths.settled
    assert site.state() == "unknown"


def test_a_refusal_says_why(tmp_path: Path) -> None:
    """The second part that does not fit the line learns it, and the first one keeps its path."""
    site = Paths(tmp_path)
    one, two = part(state="evicting", path="asked"), part(state="evicting", path="asked")
    two.job = "b"
    assert site.at(0.0, one, two) == ["held", "ended"]
    assert "Gbit/s free" in site.seen[1].detail


def test_a_restarted_centre_and_a_restarted_agent_agree(tmp_path: Path) -> None:
    """An agent that asks again for what it holds already gets the same path; nothing is booked twice."""
    site = Paths(tmp_path)
    site.at(0.0, part(state="running", path="held"))
    site.at(0.6, part(state="running", path="held"))
    assert site.state() == "booked"
    site.client.centre.close()
    again = Paths(tmp_path)
    assert again.at(2.0, part(state="running", path="held")) == ["held"]
    assert again.state() == "booked"
