"""A user's, an owner's and an operator's day on real training: every page with content, and its picture.

With `--pictures` the pictures of `docs/guide/console.md` are written again; with `--whole` it writes them elsewhere.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from isthmus.client.api_client import ApiClient
from isthmus.client.client_settings import read_token
from isthmus.core.owner.tariff import Tariff
from tests.console.chromium import NewPage, Page
from tests.e2e.site import clusters_of, make_job, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PICTURES = Path(__file__).parents[2] / "docs" / "guide" / "console"
SITES = {"hangzhou": 1, "nanjing": 1, "qingyang": 1}


def text_of(folder: Path, name: str, **changes: object) -> str:
    """Return the text of a job on the model and the text of `folder`."""
    job = make_job(folder, name, policy="manual", **changes)  # type: ignore[arg-type]
    return yaml.safe_dump(job.model_dump(mode="json", by_alias=True, exclude_defaults=True), sort_keys=False)


def test_every_page_has_its_picture(tmp_path: Path, new_page: NewPage, request: pytest.FixtureRequest) -> None:
    """Prices are published, a job is planned, chosen and trained while another waits; each page shows it, faultless."""
    wanted, whole = request.config.getoption("--pictures"), request.config.getoption("--whole")
    if not (wanted or whole):
        pytest.skip("a real training: --whole runs it, --pictures writes its pictures")
    pictures = PICTURES if wanted else tmp_path / "pictures"

    def picture(page: Page, name: str, most: int = 1500) -> None:
        page.picture(pictures / f"{name}.png", 1120, most)
        assert page.axe() == []
        assert page.problems() == []

    with running(tmp_path, clusters_of(SITES, 1.0)) as pool:
        page = new_page(pool.server)
        page.find("#token")
        picture(page, "sign-in")
        for site, price in (("hangzhou", "1200"), ("nanjing", "500"), ("qingyang", "1000")):
            with ApiClient(pool.server, read_token(tmp_path / f"{site}-owner.token")) as owner:
                given = {"cluster": site, "node_group": "cpu", "per_chip_hour": price}
                owner.publish_tariff(Tariff.model_validate({"currency": "CNY", "prices": [given]}))
        page.sign_in(read_token(tmp_path / "user.token"))
        _submit_and_choose(page, tmp_path, picture)
        _queue_three(page, tmp_path)
        page.go("queue")
        page.sees("2 jobs", "waits for resources")
        picture(page, "queue")
        page.go("jobs")
        page.sees("running")
        page.until(lambda: "running" in page.find("tbody tr:last-child").text, "the first job runs")
        page.find("tbody tr:last-child a").click()
        page.sees("running", "Loss from", "Stages and links", "Throughput")
        page.until(lambda: page.driver.execute_script(_STEPS) >= 30, "30 steps")
        picture(page, "job", 2000)
        page.go("pool")
        page.sees("3 sites", "Reserved")
        page.find(".map .flow")
        picture(page, "pool")
        page.go("bill")
        page.sees("running")
        picture(page, "bill")
        page.press("Sign out")
        page.sign_in(read_token(tmp_path / "hangzhou-owner.token"))
        page.go("owner")
        page.sees("Income", "running")
        picture(page, "owner")
        page.press("Sign out")
        page.sign_in(read_token(tmp_path / "server" / "admin.token"))
        page.go("operator")
        page.sees("Audit log", "job-submitted", "demo")
        picture(page, "operator", 1900)
    assert {one.stem for one in pictures.glob("*.png")} == {
        "sign-in", "submit", "queue", "job", "pool", "bill", "owner", "operator",
    }  # fmt: skip


_STEPS = "return Number(document.querySelector('figcaption')?.innerText.match(/at step (\\d+)[.]/)?.[1] ?? 0)"


def _submit_and_choose(page: Page, folder: Path, picture: object) -> None:
    page.go("submit")
    page.fill("#job", text_of(folder, "small-model", steps=400))
    page.fill("#config", (folder / "model" / "config.json").read_text())
    page.press("Plan it (dry run)")
    page.sees("Candidate plans", "Expected start")
    picture(page, "submit", 2000)  # type: ignore[operator]
    page.press("Submit this job")
    page.sees("Choose a plan")
    plans = page.driver.find_elements("css selector", ".plan")
    widest = max(plans, key=lambda one: one.text.partition("\n")[0].count(" > "))
    widest.find_element("css selector", "button").click()
    page.sees("starting")


def _queue_three(page: Page, folder: Path) -> None:
    for name in ("second", "third", "fourth"):
        page.go("submit")
        page.fill("#job", text_of(folder, name, steps=400) + "policy: auto\n")
        page.fill("#config", (folder / "model" / "config.json").read_text())
        page.press("Submit")
        page.sees(name)
