"""`GroupTopology`: how cards, nodes, ToRs, super-nodes and spines of a node group are joined, in `pool.yaml`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from isthmus.core.base_model import FrozenModel, Name
from isthmus.core.pool_parts.placed_error import PlacedError

MAX_DOMAINS, MAX_RANGES = 20_000, 4_096
"""Most domains of a level, and most ranges of nodes in one of them."""
MAX_NAMED_NODES = 100_000
"""Most nodes that a topology names at one level."""
MAX_CARD_LINKS = 512


def _as_text(given: Any) -> Any:
    """Return a node's number, as YAML reads it, as its name."""
    return str(given) if isinstance(given, int) and not isinstance(given, bool) else given


NodeRange = Annotated[
    str, BeforeValidator(_as_text), Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}(\[[0-9]{1,6}-[0-9]{1,6}\])?$")
]
"""A node, numbers such as `0-7`, or names with numbers such as `a[001-128]`."""
TopologyLevel = Literal["super-node", "ToR", "spine"]

_NUMBERS = re.compile(r"([0-9]{1,6})-([0-9]{1,6})")
_NAMES = re.compile(r"(.+)\[([0-9]{1,6})-([0-9]{1,6})\]")


class TopologyError(PlacedError):
    """Domains that form no tree; `place` leads from the topology to the field that is wrong."""


class CardLink(FrozenModel):
    """Cards of each node, by number from 0, that a link of `gbps` joins: an NVLink bridge, a switch, a NUMA half."""

    cards: Annotated[tuple[Annotated[int, Field(ge=0, lt=1024)], ...], Field(min_length=2, max_length=1024)]
    gbps: Annotated[float, Field(ge=1e-3, le=1e6)]


class TopologyDomain(FrozenModel):
    """Nodes under one switch, or joined by one scale-up link."""

    name: Name
    nodes: Annotated[tuple[NodeRange, ...], Field(min_length=1, max_length=MAX_RANGES)]

    def node_names(self) -> Iterator[str]:
        """Yield the names of its nodes."""
        for text in self.nodes:
            yield from _expand(text)


class GroupTopology(FrozenModel):
    """The tree that the nodes of a node group are in.

    Nodes go by the names that the site's scheduler gives them; the built-in one numbers them from 0. `super_nodes` are
    joined by a scale-up link: tensor, context and expert parallelism stay inside one. `tors` are the nodes of a
    top-of-rack switch, `spines` those below one spine. A domain is whole domains of the narrower levels; super-nodes
    may be wider than ToRs or inside them. Nodes that no domain of a level names stand alone there.
    """

    card_links: Annotated[tuple[CardLink, ...], Field(max_length=MAX_CARD_LINKS)] = ()
    super_nodes: Annotated[tuple[TopologyDomain, ...], Field(max_length=MAX_DOMAINS)] = ()
    tors: Annotated[tuple[TopologyDomain, ...], Field(max_length=MAX_DOMAINS)] = ()
    spines: Annotated[tuple[TopologyDomain, ...], Field(max_length=MAX_DOMAINS)] = ()

    @model_validator(mode="after")
    def _check_tree(self) -> GroupTopology:
        """Raise `TopologyError` unless every level divides the nodes and the levels are nested."""
        rows = {field: _domain_of(field, getattr(self, field)) for field, _ in _LEVELS}
        tors, super_nodes, spines = rows["tors"], rows["super_nodes"], rows["spines"]
        narrow = _not_nested(self.super_nodes, tors)
        if narrow is not None and (wide := _not_nested(self.tors, super_nodes)) is not None:
            self._refuse_nesting("tors", wide, "super-node")
        for field, domains in (("tors", self.tors), ("super_nodes", self.super_nodes)):
            if (at := _not_nested(domains, spines)) is not None:
                self._refuse_nesting(field, at, "spine")
        return self

    def _refuse_nesting(self, field: str, at: int, wider: str) -> None:
        name = getattr(self, field)[at].name
        raise TopologyError(
            f"the nodes of {dict(_LEVELS)[field]} '{name}' are in more than one {wider}, or some are in none; a domain "
            f"lies whole in a wider one",
            (field, at, "nodes"),
        )

    def levels(self) -> dict[TopologyLevel, dict[str, tuple[str, ...]]]:
        """Return the nodes of each domain of each level that is stated, narrowest level first."""
        tors_inside = _not_nested(self.super_nodes, _domain_of("tors", self.tors)) is not None
        inner = ("tors", "super_nodes") if tors_inside else ("super_nodes", "tors")
        names = dict(_LEVELS)
        return {
            names[field]: {one.name: tuple(one.node_names()) for one in getattr(self, field)}
            for field in (*inner, "spines")
            if getattr(self, field)
        }

    def num_nodes(self) -> int:
        """Return how many nodes it names at the level that names most."""
        return max((sum(len(nodes) for nodes in domains.values()) for domains in self.levels().values()), default=0)


_LEVELS: tuple[tuple[str, TopologyLevel], ...] = (("super_nodes", "super-node"), ("tors", "ToR"), ("spines", "spine"))


def _domain_of(field: str, domains: Sequence[TopologyDomain]) -> dict[str, str]:
    """Return the domain of each node; raise `TopologyError` for a node in two, a name twice, or too many nodes."""
    found: dict[str, str] = {}
    names: set[str] = set()
    level = dict(_LEVELS)[field]
    for at, domain in enumerate(domains):
        if domain.name in names:
            raise TopologyError(f"{level} '{domain.name}' appears twice", (field, at, "name"))
        names.add(domain.name)
        for number, text in enumerate(domain.nodes):
            if next(_expand(text), None) is None:
                raise TopologyError(f"'{text}' ends before it begins", (field, at, "nodes", number))
            for node in _expand(text):
                if node in found:
                    twice = f"twice in {level} '{domain.name}'"
                    both = f"in {level} '{found[node]}' and {level} '{domain.name}'; a node is in one {level}"
                    where = twice if found[node] == domain.name else both
                    raise TopologyError(f"node '{node}' is {where}", (field, at, "nodes", number))
                found[node] = domain.name
                if len(found) > MAX_NAMED_NODES:
                    raise TopologyError(f"more than {MAX_NAMED_NODES} nodes", (field, at, "nodes", number))
    return found


def _not_nested(domains: Sequence[TopologyDomain], wider: dict[str, str]) -> int | None:
    """Return the first of `domains` whose nodes are not all in one domain of `wider`, or all in none."""
    if not wider:
        return None
    for at, domain in enumerate(domains):
        if len({wider.get(node) for node in domain.node_names()}) > 1:
            return at
    return None


def _expand(text: str) -> Iterator[str]:
    """Yield the nodes of a range, at most `MAX_NAMED_NODES` and one."""
    prefix, first, last = "", "", ""
    if found := _NUMBERS.fullmatch(text):
        first, last = found.groups()
    elif found := _NAMES.fullmatch(text):
        prefix, first, last = found.groups()
    else:
        yield text
        return
    width = len(first) if first.startswith("0") and len(first) > 1 else 0
    for number in range(int(first), min(int(last), int(first) + MAX_NAMED_NODES) + 1):
        yield f"{prefix}{number:0{width}d}"
