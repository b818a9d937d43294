"""What `isthmus usage` prints."""

from __future__ import annotations

from isthmus.core.views.usage_views import UsageRow, UsageView
from tests.cli.fake_server import FakeServer, run
from tests.cli.samples import START_S


def server() -> FakeServer:
    """Two owners, of whom one has given chips to two users."""
    rows = (
        UsageRow(owner="owner-a", cluster="hangzhou", user="alice", chip_hours=12.5, num_chips=0),
        UsageRow(owner="owner-b", cluster="qingyang", user="alice", chip_hours=1.0, num_chips=4),
        UsageRow(owner="owner-b", cluster="qingyang", user="bob", chip_hours=0.25, num_chips=0),
    )
    given, taken = {"owner-a": 12.5, "owner-b": 1.25}, {"alice": 13.5, "bob": 0.25}
    return FakeServer(usage=UsageView(since_s=START_S, now_s=START_S + 9e4, given=given, taken=taken, rows=rows))


def test_usage_sums_by_owner_and_by_user_and_lists_each_users_clusters() -> None:
    """Hours with two decimals; the chips that are held now."""
    done = run(server(), "usage")
    assert done.status == 0
    for text in ("owner-a has given 12.50", "owner-b has given 1.25", "alice has taken 13.50", "bob has taken 0.25"):
        assert text in done.out
    row = next(line for line in done.out.splitlines() if line.startswith("owner-b"))
    assert row.split() == ["owner-b", "qingyang", "alice", "1.00", "4"]


def test_usage_json_has_the_fields_that_scripts_may_rely_on() -> None:
    """`{since_s, now_s, given, taken, rows}`; no rounding."""
    found = run(server(), "usage", "--json").json
    assert (found["since_s"], found["now_s"]) == (START_S, START_S + 9e4)
    assert found["given"] == {"owner-a": 12.5, "owner-b": 1.25}
    assert found["taken"] == {"alice": 13.5, "bob": 0.25}
    row = {"owner": "owner-b", "cluster": "qingyang", "user": "bob", "chip_hours": 0.25, "num_chips": 0}
    assert found["rows"][2] == row


def test_a_pool_without_usage_says_so() -> None:
    """Neither sums nor an empty table."""
    assert run(FakeServer(), "usage").out.strip() == "No chips have been used."
