"""The interface, fuzzed from its own document: whatever is sent, no answer is a 5xx, all are documented."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from tests.control.serving import EAST, WEST, report
from tests.control.test_server_api import Server

pytestmark = pytest.mark.slow

EXAMPLES = 8
"""Requests per operation."""
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]

_server = Server()
schema = schemathesis.openapi.from_asgi("/openapi.json", _server.http.app).exclude(path="/v1/events")
"""Without the stream, which does not end: `test_stream.py` sends what is wrong with it."""


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The server with jobs and sites, so that some of what is asked for exists.

    One a process, since its threads start once: a process of tests may take from this module, from others, and again.
    """
    _server.shell.start()
    with _server.http:
        _server.prepared(name="tiny", key="k")
        _server.submit(policy="manual")
        for site in (EAST, WEST):
            _server.sync(report(site))
        yield _server
    _server.shell.close()


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
def test_no_request_is_answered_by_a_5xx(case: Case, server: Server) -> None:
    """Valid and invalid requests alike, from an admin: no role stops them before they are looked at."""
    response = case.call(headers={"Authorization": "Bearer root"}, timeout=60)
    case.validate_response(response, checks=CHECKS)
