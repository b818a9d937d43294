"""`QueuePairs`: which two directions belong to one queue pair.

The base transport header names the receiver's queue pair only, so a gateway learns the sender's from the first answer.
Linux derives the UDP source port from both queue-pair numbers, the same in both directions; a pair is learned only
where one queue pair alone uses its port between two addresses, so that no answer is taken for another one's.
"""

from __future__ import annotations

from isthmus.wan.roce.roce_view import FlowKey, swap_ends


class QueuePairs:
    """Pairs of a direction to the other site (outgoing) and one from it (incoming)."""

    def __init__(self) -> None:
        self._incoming: dict[FlowKey, FlowKey] = {}
        self._outgoing: dict[FlowKey, FlowKey] = {}
        self._users: dict[tuple[bytes, int], set[int]] = {}
        self._shared: set[tuple[bytes, int]] = set()

    def __len__(self) -> int:
        return len(self._incoming)

    def enter(self, key: FlowKey, port: int) -> None:
        """Note that a direction uses a port."""
        place = key[0], port
        users = self._users.setdefault(place, set())
        users.add(key[1])
        if len(users) > 1:
            self._shared |= {place, (swap_ends(key[0]), port)}

    def leave(self, key: FlowKey, port: int) -> None:
        """Note that a direction is over; a port that was shared stays so while it is used."""
        place, other = (key[0], port), (swap_ends(key[0]), port)
        if (users := self._users.get(place)) is not None:
            users.discard(key[1])
            if not users:
                del self._users[place]
                if other not in self._users:
                    self._shared -= {place, other}

    def is_shared(self, ends: bytes, port: int) -> bool:
        """Return whether several queue pairs between two addresses use a port."""
        return bool(self._shared) and (ends, port) in self._shared

    def join(self, outgoing: FlowKey, incoming: FlowKey) -> bool:
        """Pair two directions; return whether they are paired now, False if one has another partner."""
        if self._incoming.get(outgoing, incoming) != incoming or self._outgoing.get(incoming, outgoing) != outgoing:
            return False
        self._incoming[outgoing], self._outgoing[incoming] = incoming, outgoing
        return True

    def incoming_of(self, outgoing: FlowKey) -> FlowKey | None:
        """Return the other direction of an outgoing one."""
        return self._incoming.get(outgoing)

    def outgoing_of(self, incoming: FlowKey) -> FlowKey | None:
        """Return the other direction of an incoming one."""
        return self._outgoing.get(incoming)

    def part_outgoing(self, outgoing: FlowKey) -> None:
        """Forget the pair of an outgoing direction."""
        if (incoming := self._incoming.pop(outgoing, None)) is not None:
            del self._outgoing[incoming]

    def part_incoming(self, incoming: FlowKey) -> None:
        """Forget the pair of an incoming direction."""
        if (outgoing := self._outgoing.pop(incoming, None)) is not None:
            del self._incoming[outgoing]
