"""`Writer`: each state is written in one way, whatever its numbers and whichever owner is called what.

First `renumber` gives new numbers; then of the sites that the server sees alike the one with the
lower number stands first. (That owners' names do not matter otherwise, `Components.place` has seen to.)
"""

from __future__ import annotations

from functools import partial
from itertools import combinations

import numpy as np

from tests.control.model.components import Components
from tests.control.model.renumber import Anew, Known, anew, server_anew, site_anew
from tests.control.model.rows import Books, Ints

_BITS = 14
"""Of the number of what a component knows."""


class Writer:
    """Writes the states made of `parts`. `server` is [states], `sites` is [states, places], of numbers."""

    def __init__(self, parts: Components) -> None:
        self._parts, self._books = parts, Books()
        self._num_sites = len(parts.scenario.sites)
        self._orders: list[tuple[int, ...]] = [tuple(range(self._num_sites))]
        self._anews: list[Anew] = []

    def written(self, server: Ints, sites: Ints) -> tuple[Ints, Ints]:
        """Return the servers and sites of states as each state is written."""
        server, sites = self._counted_anew(server, sites)
        seen, sites = self._parts.server_facts.column("seen")[server], sites.copy()
        for one, other in combinations(range(self._num_sites), 2):
            alike = seen[:, one] == seen[:, other]
            low, high = np.minimum(sites[:, one], sites[:, other]), np.maximum(sites[:, one], sites[:, other])
            sites[:, one] = np.where(alike, low, sites[:, one])
            sites[:, other] = np.where(alike, high, sites[:, other])
        return server, sites

    def order(self, order: tuple[int, ...]) -> int:
        """Return the number of an order of sites (`Placed.order`), 0 that of those that stay."""
        if order not in self._orders:
            self._orders.append(order)
        return self._orders.index(order)

    def ordered(self, sites: Ints, order: Ints) -> Ints:
        """Return sites moved to where their server has them; `order` is [states]."""
        if not order.any():
            return sites
        moved = sites.copy()
        for number, places in enumerate(self._orders[1:], start=1):
            which = np.flatnonzero(order == number)
            for place, new in enumerate(places):
                moved[which, new] = sites[which, place]
        return moved

    def _counted_anew(self, server: Ints, sites: Ints) -> tuple[Ints, Ints]:
        known, keys = self._parts.site_facts.column("known"), self._parts.server_facts.column("known")[server]
        if len(self._parts.known.things) >> _BITS:
            raise OverflowError("the components know more different numbers than there is room for")
        for place in range(self._num_sites):
            keys = (keys << _BITS) | known[sites[:, place]]
        numbers = self._books.look_up("anew", keys, self._anew)
        which = np.flatnonzero(numbers)
        if not len(which):
            return server, sites
        new, server, sites = (numbers[which] - 1) << 32, server.copy(), sites.copy()
        placed = self._books.look_up("server", new | server[which], self._server_anew)
        server[which] = placed >> 8
        moved = np.empty((len(which), self._num_sites), dtype=np.int64)
        for place in range(self._num_sites):
            key = new | sites[which, place]
            moved[:, place] = self._books.look_up(f"site {place}", key, partial(self._site_anew, place))
        sites[which] = self.ordered(moved, placed & 0xFF)
        return server, sites

    def _anew(self, key: int) -> int:
        """Return 0 where these numbers are as they should be, else 1 + the place of what they should be."""
        known: list[Known] = self._parts.known.things
        places = reversed(range(self._num_sites))
        sites = [known[(key >> (_BITS * place)) & ((1 << _BITS) - 1)] for place in places]
        found = anew(known[key >> (_BITS * self._num_sites)], sites)
        if found is None:
            return 0
        self._anews.append(found)
        return len(self._anews)

    def _server_anew(self, key: int) -> int:
        coordinator = server_anew(self._parts.server(key & 0xFFFFFFFF), self._anews[key >> 32])
        server, order = self._parts.place(coordinator)
        return (server << 8) | self.order(order)

    def _site_anew(self, place: int, key: int) -> int:
        numbers = self._anews[key >> 32]
        site = site_anew(self._parts.site(key & 0xFFFFFFFF), numbers, numbers.lives[place])
        return self._parts.put(site)
