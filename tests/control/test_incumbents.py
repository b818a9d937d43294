"""Which agent speaks for a cluster."""

from __future__ import annotations

import pytest

from isthmus.control.service.agent_takeover import AgentTakeover
from isthmus.core.errors import ConflictError, UnavailableError


def test_a_new_agent_takes_over_with_its_second_report() -> None:
    """The server asks it to report again; from then on the previous agent gets the error that it was replaced."""
    site = AgentTakeover()
    site.check("east", "one")
    with pytest.raises(UnavailableError, match="takes over with its next report"):
        site.check("east", "two")
    site.check("east", "two")
    site.check("east", "two")
    with pytest.raises(ConflictError, match="another agent of cluster 'east' has taken over"):
        site.check("east", "one")


def test_a_dead_agents_late_first_report_does_not_lock_the_living_one_out() -> None:
    """1. Agent zero reports and dies, its report on its way; 2. one reports; 3. zero's arrives."""
    site = AgentTakeover()
    site.check("east", "one")
    with pytest.raises(UnavailableError):
        site.check("east", "zero")
    site.check("east", "one")


def test_clusters_do_not_mix() -> None:
    """Two clusters have an agent each, whatever their incarnations are called."""
    site = AgentTakeover()
    site.check("east", "one")
    site.check("west", "two")
    site.check("east", "one")


def test_a_server_that_restarts_knows_who_was_replaced() -> None:
    """What the log says of the agents so far holds on: the last goes on, those before it stay replaced."""
    site = AgentTakeover({"east": ("zero", "one")})
    site.check("east", "one")
    with pytest.raises(ConflictError):
        site.check("east", "zero")
