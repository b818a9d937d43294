"""Attack of a user on another one's job over a whole pool: server, agents with storage roots, and their workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from isthmus.client.api_client import ApiClient
from isthmus.client.client_settings import read_token
from isthmus.core.errors import NotFoundError
from isthmus.core.views.api_views import TokenRequest
from tests.attack.test_users_on_storage import digest
from tests.e2e.site import choose, clusters_of, make_job, running, state_is, submit

pytestmark = [pytest.mark.attack, pytest.mark.slow]


def test_a_user_gets_nothing_of_anothers_job_through_the_pool(tmp_path: Path) -> None:
    """Over two sites a job trains within its user's roots, under the limits of its workers.

    Another user then names its id and its folders; the sites refuse before any chip is held, with roots and advice.
    """
    users = tmp_path / "users"
    roots = [
        {"path": f"{users}/{{user}}"},
        *({"path": f"{tmp_path}/{one}", "access": "read"} for one in ("model", "text")),
    ]
    (tmp_path / "policy.yaml").write_text(yaml.safe_dump({"storage": {"roots": roots}}))
    with running(tmp_path, clusters_of({"north": 1, "south": 1}, 1.0)) as pool:
        hers = users / "demo" / "first"
        own = {"checkpoints": {"folder": str(hers / "checkpoints")}, "output": str(hers / "result")}
        job = submit(pool.client, make_job(tmp_path, "first", steps=4, policy="manual", transport="process", **own))
        choose(pool.client, job.id, lambda plan: len(plan.clusters) == 2)
        state_is(pool.client, job.id, "succeeded")
        before = digest(hers)
        with ApiClient(pool.server, read_token(tmp_path / "server" / "admin.token")) as admin:
            token = admin.create_token(TokenRequest(role="user", name="eve")).token
        with ApiClient(pool.server, token) as eve:
            mine = {"checkpoints": {"folder": str(users / "eve" / "ck")}, "output": str(users / "eve" / "result")}
            with pytest.raises(NotFoundError, match="no job"):
                submit(eve, make_job(tmp_path, "by-id", resume=job.id, **mine))
            (users / "eve").mkdir()
            (users / "eve" / "link").symlink_to(hers)
            for name, change in (
                ("resume", {"resume": str(hers / "checkpoints")}),
                ("link", {"output": str(users / "eve" / "link" / "result")}),
            ):
                refused = submit(eve, make_job(tmp_path, name, **mine | change))
                view = state_is(eve, refused.id, "failed", "succeeded")
                assert view.state == "failed"
                assert "outside the storage roots of user 'eve'" in view.reason, view.reason
                assert f"'eve' may write below {users}/eve" in view.reason
                assert list(tmp_path.glob(f"*/runs/{refused.id}")) == [], "no site has started anything"
        assert digest(hers) == before
