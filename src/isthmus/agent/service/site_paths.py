"""`SitePaths`: keeps what the decision centre of the network books equal to what the site's parts want.

A part that is prepared holds its paths, one that runs has confirmed them, and all others are released: the centre is a
party of the joint start, asked again and again until it answers, as a scheduler is for holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from isthmus.agent.service.promised_rates import path_name
from isthmus.agent.service.scheduler_calls import SchedulerCalls
from isthmus.core.pool_resource import KBPS_PER_GBPS
from isthmus.site import PartKey, PathObserved, SiteEvent, SitePart, outgoing_kbps
from isthmus.wan import CentreClient, PathRequest, PathState

ASK_INTERVAL_S = 0.5
RENEW_INTERVAL_S = 15.0
"""A quarter of the time for which a centre keeps what is not renewed."""


@dataclass
class _Path:
    part: PartKey
    request: PathRequest
    state: str = ""
    due_s: float = 0.0


class SitePaths:
    """The paths that leave `cluster`; `observe` gets what became of those of each part."""

    def __init__(
        self, client: CentreClient, calls: SchedulerCalls, cluster: str, observe: Callable[[SiteEvent], object]
    ) -> None:
        self._client, self._calls, self._cluster, self._observe = client, calls, cluster, observe
        self._paths: dict[str, _Path] = {}
        self._unwanted: set[str] = set()

    @property
    def settled(self) -> bool:
        """Whether every path that no part wants has been released."""
        return not self._unwanted and not self._paths

    def reconcile(self, parts: Iterable[SitePart], now_s: float) -> None:
        """Ask for, renew, confirm and release paths."""
        wanted: dict[str, _Path] = {}
        running = set()
        for part in parts:
            if not part.path:
                continue
            if part.state == "running":
                running.add(part.key)
            for target, kbps in outgoing_kbps(part, self._cluster).items():
                name = path_name(part.key, target)
                request = PathRequest(
                    name=name, source=self._cluster, target=target, bandwidth_gbps=kbps / KBPS_PER_GBPS
                )
                wanted[name] = self._paths.get(name) or _Path(part.key, request)
        self._unwanted |= self._paths.keys() - wanted.keys()
        self._unwanted -= wanted.keys()
        self._paths = wanted
        for name in sorted(self._unwanted):
            self._calls.submit(name, partial(self._client.release, name), partial(self._released, name))
        for name, path in wanted.items():
            if now_s >= path.due_s:
                path.due_s = now_s + ASK_INTERVAL_S
                call: Callable[[], PathState] = partial(self._client.ask, path.request)
                if path.state == "held":
                    call = partial(self._client.confirm if path.part in running else self._client.renew, name)
                    path.due_s = now_s + RENEW_INTERVAL_S
                elif path.state:
                    call, path.due_s = partial(self._client.look, name), now_s + RENEW_INTERVAL_S
                self._calls.submit(name, call, partial(self._answered, name, now_s))

    def _released(self, name: str, _answer: PathState) -> None:
        self._unwanted.discard(name)

    def _answered(self, name: str, now_s: float, answer: PathState) -> None:
        path = self._paths.get(name)
        if path is None:
            return
        if answer.state in ("refused", "released", "unknown"):
            path.state, path.due_s = "", now_s + ASK_INTERVAL_S
            detail = f"no path to {path.request.target}: {answer.reason}"
            self._observe(PathObserved(now_s=now_s, part=path.part, state="ended", detail=detail))
            return
        if answer.state == "held" and path.state != "held":
            path.due_s = now_s  # a part that runs already confirms it at once
        path.state = answer.state
        mine = [one for one in self._paths.values() if one.part == path.part]
        if all(one.state and one.state != "preparing" for one in mine):
            self._observe(PathObserved(now_s=now_s, part=path.part, state="held"))
