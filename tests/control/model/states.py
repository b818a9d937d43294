"""`States`: many whole states as arrays of numbers, their steps worked out for all of them at once.

A state is one integer: what is left of each wish, the server's number, each site's (`write_id`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tests.control.model.components import Components, Effect, Heard
from tests.control.model.facts import ATTEMPTS
from tests.control.model.kinds import Kind
from tests.control.model.pool import badly_ended, training
from tests.control.model.rows import Books, Flags, Ints, Rows
from tests.control.model.scenario import Scenario
from tests.control.model.site import Site
from tests.control.model.writing import Writer


class Columns(NamedTuple):
    """States side by side: `sites` is [states, sites], the others [states]."""

    left: Ints
    server: Ints
    sites: Ints

    def take(self, which: Ints | Flags) -> Columns:
        """Return some of the states."""
        return Columns(self.left[which], self.server[which], self.sites[which])


class Steps(NamedTuple):
    """Steps of many states: of which state, of what `Kind`, to what; `bad` is a number in `States.wrong`."""

    of: Ints
    kind: Ints
    to: Ints
    bad: Ints


_SITE = 32
"""Bits of a site's number."""

Found = tuple[Ints, Ints, Ints, Columns]
"""Steps of many states: of which, of what kind, the number of what is to be looked at, to where."""


class States:
    """The states of a scenario, and their steps."""

    def __init__(self, scenario: Scenario, components: type[Components] = Components) -> None:
        self.scenario = scenario
        self.parts = components(scenario)
        self.num_sites = len(scenario.sites)
        self._wishes = {kind: num for kind, num in scenario.wishes.items() if num}
        self._all_left = math.prod(num + 1 for num in self._wishes.values()) - 1
        self.site_bits = 42 // self.num_sites
        self.server_bits = 63 - self._all_left.bit_length() - self.num_sites * self.site_bits
        self.wrong = [""]
        self._placed = list[int]()
        self._heard: list[Heard | None] = [None]
        self._effects, self._joint = Rows(5), Rows(self.num_sites)
        self._writer, self._books = Writer(self.parts), Books()

    def start(self) -> Ints:
        """Return the one state with which all begins."""
        site = self.parts.put(Site())
        placed = self.parts.place(self.parts.rules.start(Site().look()).coordinator)
        sites = np.full((1, self.num_sites), site)
        return self._packed(Columns(np.array([self._all_left]), np.array([placed.server]), sites))

    def columns(self, states: Ints) -> Columns:
        """Return states as columns."""
        mask, n = (1 << self.site_bits) - 1, self.num_sites
        places = np.stack([(states >> (self.site_bits * place)) & mask for place in range(n)], axis=1)
        sites = np.array(self._placed, dtype=np.int64)[places]
        rest = states >> (self.site_bits * n)
        return Columns(rest >> self.server_bits, rest & ((1 << self.server_bits) - 1), sites)

    def pure(self, states: Ints) -> Ints:
        """Return states without what is left of wishes."""
        return states & ((1 << (self.server_bits + self.site_bits * self.num_sites)) - 1)

    def steps(self, states: Ints, kinds: Sequence[Kind]) -> Steps:
        """Return the steps of `states` that are of one of `kinds`, for which something is left."""
        at = self.columns(states)
        parts = [*self._own_steps(at, faulty=False), self._joint_steps(at)]
        if Kind.FAULT in kinds:
            parts += self._own_steps(at, faulty=True)
        of, kind, flag = (np.concatenate([part[i] for part in parts]) for i in range(3))
        to = Columns(*(np.concatenate([part[3][i] for part in parts]) for i in range(3)))
        wanted = np.isin(kind, [*kinds])
        of, kind, flag, to = of[wanted], kind[wanted], flag[wanted], to.take(wanted)
        left, allowed = self._spend(to.left, kind)
        of, kind, flag, to = of[allowed], kind[allowed], flag[allowed], to.take(allowed)
        bad = self._judge(flag, at.sites[of])
        return Steps(of, kind, self._packed(to._replace(left=left[allowed])), bad)

    def judge(self, states: Ints) -> tuple[Ints, str]:
        """Return the places of states in which something is wrong, and what in the first."""
        at, servers, sites = self.columns(states), self.parts.server_facts, self.parts.site_facts
        bad = (servers.column("wrong")[at.server] != 0) | sites.column("wrong")[at.sites].any(axis=1)
        alive = np.bitwise_or.reduce(sites.column("alive")[at.sites], axis=1)
        bad |= (alive & ~servers.column("committed")[at.server]) != 0
        for job in range(len(self.scenario.jobs)):
            ours = (alive >> (ATTEMPTS * job)) & ((1 << ATTEMPTS) - 1)
            bad |= (ours & (ours - 1)) != 0
        found = np.flatnonzero(bad)
        if not len(found):
            return found, ""
        first = at.take(found[:1])
        said = [servers[int(first.server[0])].wrong, *(sites[site].wrong for site in first.sites[0].tolist())]
        more = "a job has processes of two attempts, or of one that was not committed"
        return found, next((one for one in said if one), more)

    def goals(self, states: Ints) -> Flags:
        """Tell which states are goals: all jobs have ended, and nothing of them is at any site."""
        at, servers, sites = self.columns(states), self.parts.server_facts, self.parts.site_facts
        goals: Flags = servers.column("all_ended")[at.server] != 0
        return goals & sites.column("is_empty")[at.sites].all(axis=1)

    def _own_steps(self, at: Columns, faulty: bool) -> Iterator[Found]:
        """Yield the steps of servers, of sites, and of both together."""
        word = "faults" if faulty else "steps"
        of_server, of_site, of_both = self.parts.of_server, self.parts.of_site, self.parts.of_both
        yield self._stepped(at, None, at.server, lambda key: of_server(key, faulty), f"server {word}")
        for place in range(self.num_sites):
            sites = at.sites[:, place]
            yield self._stepped(at, place, sites, lambda key: of_site(key, faulty), f"site {word}")

            def message(key: int, place: int = place) -> list[Effect]:
                return of_both(key >> _SITE, place, key & ((1 << _SITE) - 1), faulty)

            keys = (at.server << _SITE) | sites
            yield self._stepped(at, place, keys, message, f"both {word} {place}")

    def _stepped(
        self, at: Columns, place: int | None, keys: Ints, work_out: Callable[[int], list[Effect]], book: str
    ) -> Found:
        """Return steps of which each state has those of its key; a site's are of the one at `place`."""
        rows = self._books.look_up(book, keys, lambda key: self._effects.add(self._entries(work_out(key))))
        of, entries = self._effects.gather(rows)
        kind, server, order, site, flag = (entries[:, i].astype(np.int64) for i in range(5))
        sites = at.sites[of]
        if place is not None:
            sites[:, place] = np.where(site >= 0, site, sites[:, place])
        sites = self._writer.ordered(sites, order)
        return of, kind, flag, Columns(at.left[of], np.where(server >= 0, server, at.server[of]), sites)

    def _joint_steps(self, at: Columns) -> Found:
        """Return the steps that all sites of a job take together."""
        train, trains = np.zeros(len(at.server), dtype=bool), self.parts.site_facts.column("trains")
        for job, (_, places) in enumerate(self.scenario.jobs):
            numbers = [self.scenario.sites.index(name) for name in places]
            attempts = trains[at.sites[:, numbers], job]
            train |= (attempts[:, 0] > 0) & (attempts == attempts[:, :1]).all(axis=1)
        which = np.flatnonzero(train)
        keys = self._packed_sites(at.sites[which])
        rows = self._books.look_up("joint", keys, self._work_out_joint)
        of, sites = self._joint.gather(rows)
        of = which[of]
        nothing = np.zeros(len(of), dtype=np.int64)
        return of, nothing, nothing, Columns(at.left[of], at.server[of], sites.astype(np.int64))

    def _work_out_joint(self, key: int) -> int:
        numbers = self._unpacked_sites(key)
        sites, found = dict(zip(self.scenario.sites, map(self.parts.site, numbers), strict=True)), []
        for _, after in training(sites, self.scenario):
            both = zip(sites, numbers, strict=True)
            found.append([self.parts.put(after[name]) if name in after else number for name, number in both])
        return self._joint.add(found)

    def _entries(self, effects: list[Effect]) -> list[tuple[int, int, int, int, int]]:
        found = []
        for kind, _, heard, site in effects:
            server, order, flag = -1, 0, 0
            if heard is not None:
                server, order = heard.placed.server, self._writer.order(heard.placed.order)
                if heard.ended or heard.wrong:
                    flag = len(self._heard)
                    self._heard.append(heard)
            found.append((int(kind), server, order, -1 if site is None else site, flag))
        return found

    def _spend(self, left: Ints, kind: Ints) -> tuple[Ints, Flags]:
        """Return what is left of wishes after steps of a kind, and which steps may be taken."""
        left, allowed, unit = left.copy(), kind <= Kind.SUBMIT, 1
        for wish, num in reversed(self._wishes.items()):
            mine = (kind == wish) & ((left // unit) % (num + 1) > 0)
            left[mine] -= unit
            allowed |= mine
            unit *= num + 1
        return left, allowed

    def _judge(self, flag: Ints, sites: Ints) -> Ints:
        """Return by step the number of what is wrong with it: it ends who has not saved, or worse."""
        bad, which = np.zeros(len(flag), dtype=np.int64), np.flatnonzero(flag)
        keys = (flag[which] << (self.site_bits * self.num_sites)) | self._packed_sites(sites[which])
        bad[which] = self._books.look_up("judged", keys, self._judge_one)
        return bad

    def _judge_one(self, key: int) -> int:
        heard = self._heard[key >> (self.site_bits * self.num_sites)]
        assert heard is not None
        what = heard.wrong or badly_ended(heard.ended, map(self.parts.site, self._unpacked_sites(key)))
        if not what:
            return 0
        self.wrong.append(what)
        return len(self.wrong) - 1

    def _packed(self, at: Columns) -> Ints:
        """Return states as integers, in the one way in which each is written."""
        server, sites = self._writer.written(at.server, at.sites)
        if len(self.parts.server_facts) >> self.server_bits:
            raise OverflowError(f"{self.scenario}: more servers than the states have room for")
        own = (at.left << self.server_bits) | server
        return (own << (self.site_bits * self.num_sites)) | self._packed_sites(sites)

    def _packed_sites(self, sites: Ints) -> Ints:
        """Return the sites of states as one integer: each as its place among those that are in any state."""
        places = self._books.look_up("places", sites.ravel(), self._place).reshape(sites.shape)
        packed = np.zeros(len(sites), dtype=np.int64)
        for place in range(self.num_sites):
            packed |= places[:, place] << (self.site_bits * place)
        return packed

    def _place(self, number: int) -> int:
        if len(self._placed) >> self.site_bits:
            raise OverflowError(f"{self.scenario}: more sites than the states have room for")
        self._placed.append(number)
        return len(self._placed) - 1

    def _unpacked_sites(self, key: int) -> list[int]:
        numbers: list[int] = self.columns(np.array([key])).sites[0].tolist()
        return numbers
