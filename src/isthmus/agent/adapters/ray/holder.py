"""The holder: a Ray driver that holds placement groups for one agent and starts ranks inside them.

It runs under the courier on the Ray cluster, `python holder.py FOLDER ARCHIVE`, and knows nothing of Isthmus:

    hold-ID.json    from the agent: bundles, labels, number of renewals, lease in seconds, whether it is released
    rank-ID.json    from the agent: hold, bundle and the ticket of a rank
    state-ID.json   to the agent: `waiting`, `granted` with the node of each bundle, or `ended`

A hold ends when it is released, or its lease after the last renewal was seen. Its ranks end before its cards are given
back. The holder ends once it holds nothing and has seen no renewal of its own lease, and with all that it holds once
its own folder is released.

Ray 2.60 leaks the cards of a group that is removed between the lease of its bundles and their commit, a few ms: so a
group is removed when it has its cards or waits for them, and a hold that was released before has none.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLL_S = 0.05
CLEAR_S = 10.0
"""How long ranks of an ended hold have to end by themselves, which they do, before Ray ends their processes."""
SETTLE_S = 30.0
"""How long an ended hold may be between its states at Ray before its group is removed all the same."""
WAITING = ("NO_RESOURCES", "INFEASIBLE")
"""The states of a group at Ray's scheduler in which it has been tried and has no bundle."""


def keep_rank(archive: bytes, ticket: str) -> int:
    """Run the courier of a rank until it has ended; it ends with this process, by the end of a pipe."""
    import os
    import shutil
    import subprocess
    import sys
    import tempfile
    from pathlib import Path

    folder = Path(tempfile.mkdtemp(prefix="isthmus-rank-"))
    try:
        (folder / "courier.pyz").write_bytes(archive)
        descriptor = os.open(folder / "ticket", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(ticket)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    open_read, open_write = os.pipe()
    done_read, done_write = os.pipe()
    # Through a shell that ends at once: Ray kills the children of a worker, and the courier has still to report. What
    # waits for the courier removes its folder, also when Ray has killed this process.
    script = """exec 3<&0; setsid sh -c '"$@"; rm -rf -- "$0"' "$@" <&3 2>/dev/null &"""
    command = (sys.executable, str(folder / "courier.pyz"), "--ticket", str(folder / "ticket"), "--while-open")
    more = ("--first-contact-s", "20", "--linger-s", "30", "--work", str(folder / "work"))
    arguments = ["sh", "-c", script, "sh", str(folder), *command, *more]
    subprocess.run(arguments, stdin=open_read, stdout=done_write, check=True, timeout=60.0)  # noqa: S603 - the agent's courier
    os.close(open_read)
    os.close(done_write)
    try:
        while os.read(done_read, 1):
            pass
    finally:
        os.close(open_write)
        os.close(done_read)
    return 0


class RayCalls:
    """What the holder asks of Ray; groups and ranks are Ray's own handles."""

    def __init__(self) -> None:
        from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        import ray

        ray.init(address="auto", log_to_driver=False, logging_level="warning")
        self._ray, self._strategy = ray, PlacementGroupSchedulingStrategy
        self._placement_group, self._remove, self._table = (
            placement_group,
            remove_placement_group,
            placement_group_table,
        )

    def make_group(self, bundles: list[dict[str, float]], labels: list[dict[str, str]] | None) -> Any:
        """Ask for a placement group, on as few nodes as possible."""
        return self._placement_group(bundles, "PACK", bundle_label_selector=labels)

    def has_cards(self, group: Any) -> bool:
        """Return whether a group has its cards."""
        return bool(group.wait(0))

    def table(self, group: Any) -> dict[str, Any]:
        """Return Ray's record of a group."""
        return dict(self._table(group))

    def remove_group(self, group: Any) -> None:
        """Give the cards of a group back."""
        self._remove(group)

    def put(self, data: bytes) -> Any:
        """Store data for the tasks of ranks."""
        return self._ray.put(data)

    def start_rank(self, group: Any, number: int, bundle: dict[str, float], archive: Any, ticket: str) -> Any:
        """Start `keep_rank` on the node of a bundle."""
        where = self._strategy(group, placement_group_bundle_index=number)
        resources = {name: num for name, num in bundle.items() if name not in ("CPU", "GPU")}
        task = self._ray.remote(keep_rank).options(
            num_cpus=0, num_gpus=bundle.get("GPU", 0), resources=resources, max_retries=0,
            scheduling_strategy=where, name="isthmus-rank",
        )  # fmt: skip
        return task.remote(archive, ticket)

    def running(self, ranks: list[Any]) -> list[Any]:
        """Return the ranks that have not ended."""
        return list(self._ray.wait(ranks, num_returns=len(ranks), timeout=0)[1]) if ranks else []

    def cancel(self, rank: Any) -> None:
        """End the process of a rank."""
        self._ray.cancel(rank, force=True)


class Held:
    """One hold: its placement group, its lease, its ranks. One that was released before its start has no group."""

    def __init__(self, order: dict[str, Any], ray: RayCalls, clock: Callable[[], float]) -> None:
        self._ray, self._clock = ray, clock
        self.group = None if order["released"] else ray.make_group(order["bundles"], order["labels"] or None)
        self.bundles, self.ranks = order["bundles"], list[Any]()
        self.state: dict[str, Any] = {"state": "waiting"}
        self._renewals, self._until_s = -1, 0.0
        self.ended_s: float | None = None

    def see(self, order: dict[str, Any]) -> None:
        """Take over what the agent says."""
        if order["renewals"] != self._renewals:
            self._renewals, self._until_s = order["renewals"], self._clock() + order["lease_s"]
        if order["released"]:
            self._until_s = 0.0

    def step(self) -> None:
        """Grant the hold once Ray has its cards; end it with its lease."""
        if self.ended_s is None and self._clock() >= self._until_s:
            self.ended_s = self._clock()
        if self.state["state"] == "ended":
            return
        if self.ended_s is not None:
            running, late = self._ray.running(self.ranks), self._clock() - self.ended_s > CLEAR_S
            if running and late:
                for rank in running:
                    self._ray.cancel(rank)
            if (not running or late) and (self._is_settled() or self._clock() - self.ended_s > SETTLE_S):
                self.remove()
                self.state = {"state": "ended"}
        elif self.state["state"] == "waiting" and self.group is not None and self._ray.has_cards(self.group):
            nodes = self._ray.table(self.group)["bundles_to_node_id"]
            self.state = {"state": "granted", "nodes": [nodes[number] for number in range(len(self.bundles))]}

    def remove(self) -> None:
        """Give the cards back."""
        if self.group is not None:
            self._ray.remove_group(self.group)

    def _is_settled(self) -> bool:
        """Return whether the group has its cards, or has none of them."""
        if self.group is None or self.state["state"] == "granted" or self._ray.has_cards(self.group):
            return True
        return self._ray.table(self.group).get("stats", {}).get("scheduling_state") in WAITING

    def start(self, order: dict[str, Any], archive: Any) -> None:
        """Start a rank on the node of its bundle."""
        if self.state["state"] != "granted" or self.ended_s is not None:
            return
        number = order["bundle"]
        self.ranks.append(self._ray.start_rank(self.group, number, self.bundles[number], archive, order["ticket"]))


class Holder:
    """All holds of one agent; `step` looks at the folder once."""

    def __init__(
        self, folder: Path, archive: bytes, ray: RayCalls, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._archive, self._ray, self._clock = folder, ray.put(archive), ray, clock
        self._held: dict[str, Held] = {}
        self._started: set[str] = set()
        self._written: dict[str, str] = {}
        self._seen: dict[str, tuple[int, int]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held."""
        return all(held.state["state"] == "ended" for held in self._held.values())

    def step(self) -> None:
        """Do what the agent's files say, and write what became of it."""
        orders = {path.name: path for path in self._folder.iterdir() if path.suffix == ".json"}
        for name in sorted(name for name in orders if name.startswith("hold-")):
            order = self._read(orders[name])
            if order is not None:
                if name not in self._held:
                    self._held[name] = Held(order, self._ray, self._clock)
                self._held[name].see(order)
        for name in sorted(orders):
            if name.startswith("rank-") and name not in self._started:
                order = self._read(orders[name])
                held = self._held.get(f"hold-{order['hold']}.json") if order is not None else None
                if order is not None and held is not None and held.state["state"] != "waiting":
                    self._started.add(name)
                    held.start(order, self._archive)
        self._started &= set(orders)
        for name, held in list(self._held.items()):
            held.step()
            state = self._folder / name.replace("hold-", "state-", 1)
            text = json.dumps(held.state)
            if self._written.get(name) != text:
                temporary = state.with_name(f".{state.name}")
                temporary.write_text(text)
                temporary.replace(state)
                self._written[name] = text
            if name not in orders and held.state["state"] == "ended":
                state.unlink(missing_ok=True)
                del self._held[name], self._written[name]
            elif name not in orders:
                held.see({"renewals": -2, "lease_s": 0.0, "released": True})

    def give_up(self) -> None:
        """End every hold: the agent wants nothing of this holder any more."""
        for held in self._held.values():
            held.see({"renewals": -2, "lease_s": 0.0, "released": True})

    def end(self) -> None:
        """Give everything back, at once."""
        for held in self._held.values():
            for rank in held.ranks:
                self._ray.cancel(rank)
            if held.state["state"] != "ended":
                held.remove()

    def _read(self, path: Path) -> dict[str, Any] | None:
        """Return a file of the agent, which replaces them at once; None if it has gone or is as it was read before."""
        try:
            found = path.stat()
            stamp = found.st_ino, found.st_mtime_ns
            if path.name.startswith("hold-") and self._seen.get(path.name) == stamp:
                return None
            order: dict[str, Any] = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        self._seen[path.name] = stamp
        return order


def main(folder: Path, archive: bytes) -> int:
    """Hold until nothing is held and the agent renews no more."""
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stopped.append(number))
    holder, hold = Holder(folder, archive, RayCalls()), Path(os.environ["ISTHMUS_HOLD"])
    text, until_s = "", time.monotonic() + 60.0
    try:
        while not stopped:
            holder.step()
            seen = (hold / "lease").read_text()
            if seen != text:
                text, until_s = seen, time.monotonic() + float(seen.split()[1])
            released = (hold / "released").exists()
            if released:
                holder.give_up()
            if holder.is_empty and (time.monotonic() >= until_s or released):
                break
            time.sleep(POLL_S)
    finally:
        holder.end()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]).read_bytes()))
