"""`isthmus submit` against a server and agents: a file that only the sites miss is known in its own answer."""

from __future__ import annotations

import io
import time

import pytest
import yaml

from isthmus.cli import main
from isthmus.cli.demo.demo_pool import DemoPool
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.client.site_checks import CHECKS_WAIT_S
from tests.e2e.site import make_job

pytestmark = pytest.mark.slow


def submit(pool: DemoPool, name: str, **changes: object) -> tuple[int, str, str]:
    """Submit a job file with the command line; return status, output and errors."""
    file = pool.folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(make_job(pool.folder, name, **changes).model_dump(mode="json")))
    env = CliEnvironment(variables={"HOME": str(pool.folder)}, stdout=io.StringIO(), stderr=io.StringIO())
    options = ("--server", pool.server, "--token-file", str(pool.folder / "user.token"))
    began_s = time.monotonic()
    status = main(["submit", str(file), *options], env=env)
    assert time.monotonic() - began_s < CHECKS_WAIT_S + 20, "the wait has a limit"
    return status, env.stdout.getvalue(), env.stderr.getvalue()  # type: ignore[attr-defined]


def test_a_file_that_only_the_sites_miss_ends_submit_with_their_finding(pairs: DemoPool) -> None:
    """Under both policies: status 6, the site, the path and what to do. Good files: the sites have passed."""
    missing = str(pairs.folder / "absent" / "*.txt")
    data = {"paths": [missing], "tokenizer": "bytes"}
    for policy, words in (("auto", "failed"), ("manual", "the sites refuse plan")):
        status, out, err = submit(pairs, f"missing-{policy}", data=data, policy=policy)
        assert status == 6, out + err
        assert words in err
        assert missing in err
        assert "north" in err or "south" in err
    status, out, err = submit(pairs, "good", policy="manual")
    assert status == 0, out + err
    assert "checks: passed at the sites of plan" in out
    for view in pairs.client.jobs():
        if view.state not in ("succeeded", "failed", "cancelled"):
            pairs.client.cancel(view.id)
