"""`WatchedRun`: a watched list of a real API server whose log is compacted and which is killed; what it missed."""

from __future__ import annotations

import random
import time
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

from isthmus.agent.adapters.kubernetes.api_access import read_access
from isthmus.agent.adapters.kubernetes.kubernetes_client import KubernetesClient
from isthmus.agent.adapters.kubernetes.watched_list import WatchedList
from isthmus.core.errors import UnavailableError
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.check_api_server import secret

SECRETS = "/api/v1/namespaces/isthmus/secrets"
SEE_S = 90.0


class WatchedRun:
    """Rounds of changes with a fault in each; a reader acts on what appears, changes and goes."""

    def __init__(self, server: ApiServer, seed: int) -> None:
        self._server, self._rng, self._label = server, random.Random(seed), uuid.uuid4().hex
        access = read_access(str(server.kubeconfig(admin=True)))
        self._admin, watcher = KubernetesClient(access, timeout_s=20), KubernetesClient(access, timeout_s=20)
        self._list = WatchedList(watcher, SECRETS, "SecretList", self._parse)
        self._alive: dict[str, tuple[str, str]] = {}
        self._gone: set[str] = set()
        self._seen: dict[str, str] = {}
        self._ended: set[str] = set()
        self.problems: Counter[str] = Counter()
        self.num_kills = self.num_compactions = self.num_changes = 0

    def run(self, num_rounds: int, is_over: Callable[[], bool] = lambda: False) -> int:
        """Make `num_rounds` rounds, fewer if the time `is_over`, then remove every object; return how many."""
        num_done = 0
        while num_done < num_rounds and not is_over():
            self._change()
            self._look()
            self._change()
            self._break()
            self._change()
            self._see_all()
            num_done += 1
        for uid in list(self._alive):
            self._delete(uid)
        self._see_all()
        return num_done

    def _parse(self, item: Any) -> str | None:
        metadata = item["metadata"]
        ours = (metadata.get("labels") or {}).get("group") == self._label
        return (metadata.get("annotations") or {}).get("number", "0") if ours else None

    def _change(self) -> None:
        """Make, change and delete objects."""
        for _ in range(self._rng.randint(2, 6)):
            uids = sorted(self._alive)
            act = self._rng.choice(("create", "change", "delete")) if len(uids) > 2 else "create"
            if act == "create":
                name = f"w-{uuid.UUID(int=self._rng.getrandbits(128)).hex[:12]}"
                made = self._admin.create(SECRETS, secret(name, self._label))
                self._alive[made["metadata"]["uid"]] = name, "0"
            elif act == "change":
                uid = self._rng.choice(uids)
                name, number = self._alive[uid]
                number = str(int(number) + 1)
                self._admin.patch(f"{SECRETS}/{name}", {"metadata": {"annotations": {"number": number}}})
                self._alive[uid] = name, number
            else:
                self._delete(self._rng.choice(uids))
            self.num_changes += 1

    def _delete(self, uid: str) -> None:
        self._admin.delete(f"{SECRETS}/{self._alive.pop(uid)[0]}")
        self._gone.add(uid)

    def _break(self) -> None:
        """Kill the server, compact its log, or both; now and then the reader looks in between."""
        fault = self._rng.choice(("kill", "compact", "both", "both"))
        if fault != "compact":
            self._server.kill()
            self.num_kills += 1
            if self._rng.random() < 0.5:
                self._look()
        if fault != "kill":
            self._server.compact()
            self.num_compactions += 1
        if fault != "compact":
            self._server.restart()

    def _look(self) -> None:
        """Act on the differences between the last look and this."""
        try:
            found = dict(self._list.refresh())
        except UnavailableError:
            return
        for uid, number in found.items():
            self.problems["appeared twice"] += uid in self._ended
            self.problems["went back"] += int(number) < int(self._seen.get(uid, "0"))
        self._ended |= self._seen.keys() - found.keys()
        self._seen = found

    def _see_all(self) -> None:
        """Look until what is seen is what there is; count what never comes."""
        deadline_s = time.monotonic() + SEE_S
        wanted = {uid: number for uid, (_, number) in self._alive.items()}
        while self._seen != wanted and time.monotonic() < deadline_s:
            self._look()
            time.sleep(0.05)
        self.problems["lost"] += sum(self._seen.get(uid) != number for uid, number in wanted.items())
        self.problems["went, and stayed"] += len(self._seen.keys() & self._gone)
