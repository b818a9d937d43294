"""Days of a user, an owner and an operator in a real Chromium, on a server and agents that are real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from isthmus.core.pool import Owner
from tests.console.chromium import NewPage, Page
from tests.control.processes import POOL, RealPool, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 300,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    """A server and two agents."""
    folder = tmp_path_factory.mktemp("pool")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    (folder / "text.txt").write_text("text " * 1000)
    owners = (Owner(name="owner-east"), Owner(name="owner-west", users=("ann",)))
    pool = RealPool(folder, POOL.model_copy(update={"owners": owners}))
    try:
        until(lambda: pool.free() == {"east": 2, "west": 2}, "both sites have joined")
        yield pool
    finally:
        pool.close()


def job_text(folder: Path, name: str, steps: int, policy: str = "manual") -> str:
    return f"""name: {name}
model: {folder}/model
data: {{paths: ["{folder}/text.txt"], tokenizer: bytes}}
training: {{steps: {steps}, sequence_length: 8, micro_batch_size: 1, global_batch_size: 2}}
checkpoints: {{folder: "{folder}/checkpoints/{{job}}"}}
output: "{folder}/out/{{job}}"
policy: {policy}
"""


def faultless(page: Page) -> None:
    """Nothing breaks a rule of axe, in light or dark, and no script or policy has complained."""
    for dark in (False, True):
        page.dark(dark=dark)
        assert page.axe() == []
    page.dark(dark=False)
    assert page.problems() == []


def test_an_owners_day_a_users_day_with_a_killed_server_and_an_operators_day(pool: RealPool, new_page: NewPage) -> None:
    """Prices; then sign in, plan, choose, watch, see the server die and come back, pay; then look after the pool."""
    page = new_page(pool.url)
    faultless(page)
    _owner_publishes(page, pool)
    _user_runs_a_job(page, pool)
    _operator_looks_after_the_pool(page, pool)


def _owner_publishes(page: Page, pool: RealPool) -> None:
    page.sign_in(pool.create_token("owner", "owner-east"))
    assert "owner-west" not in page.sees("1 site, 1 node", "owner-east"), "only links of its own name the other site"
    page.go("owner")
    page.sees("Owner owner-east", "No prices are published", "The operator lists no users of yours.")
    page.fill("input[name=price]", "3600")
    page.fill("input[name=currency]", "eur")
    page.press("Publish")
    page.sees("Published in EUR", "east/h20", "3,600.00 EUR", "all day")
    page.press("Cordon east")
    page.sees("cordoned", "owner-east")
    page.press("Uncordon east")
    page.button("Cordon east")
    faultless(page)
    page.press("Sign out")
    page.sees("Sign in")


def _user_runs_a_job(page: Page, pool: RealPool) -> None:
    page.sign_in(pool.user)
    page.sees("2 sites", "4 of them free")
    page.go("submit")
    page.fill("#job", job_text(pool.folder, "day", 120).replace("steps: 120", "steps: many"))
    page.fill("#config", json.dumps(CONFIG))
    page.press("Plan it (dry run)")
    page.sees("job.yaml:4: training.steps")
    page.fill("#job", job_text(pool.folder, "day", 120))
    page.press("Plan it (dry run)")
    page.sees("Candidate plans", "p1", "p2", "If you submit it now", "Expected start")
    faultless(page)
    page.press("Submit this job")
    page.sees("choosing", "Choose a plan", "p1", "p2")
    faultless(page)
    page.press("Choose p2")
    page.sees("running", "Loss from", "started")
    pool.kill("server")
    page.sees("No connection to the server since")
    pool.start("server")
    page.sees("Connected to the server again at", "succeeded", "finished")
    page.sees("step 119 of rank 0 äöü", "Loss from 5 at step 0")
    faultless(page)
    job = page.find("p.mono").text
    page.go("bill")
    page.sees("Statement", "day-", "east", "running")
    page.until(lambda: float(page.find("#total").text.split()[0]) > 0, "a total above 0")
    faultless(page)
    page.go("jobs")
    page.sees("succeeded", job)
    page.go("queue")
    page.sees("No job waits for chips.")
    page.press("Sign out")
    page.sees("Sign in")


def _operator_looks_after_the_pool(page: Page, pool: RealPool) -> None:
    page.sign_in(pool.admin_token())
    page.go("operator")
    page.sees("Projects and quotas", "user ann", "Limits", "signed-in", "tariff-published", "plan-chosen", "owner-east")
    page.fill("input[name=account]", "user:ann")
    page.fill("input[name=chips]", "3")
    page.press("Set limits")
    page.sees("The limits of user:ann are set.", "0 of 3", "quotas-set")
    page.fill("input[name=account]", "user:ann")
    page.fill("input[name=chips_at]", "east=2")
    page.press("Set limits")
    page.sees("at east", "0 of 2")
    page.fill("input[name=account]", "project:none")
    page.press("Set limits")
    page.sees("no project 'none'", "isthmus quota show lists them")
    page.fill("input[name=name]", "carl")
    page.press("Create a token")
    token = page.find(".secret").text
    page.press("Hide it")
    page.press("Check the ledger")
    page.sees("Unpaired", "Differences", "none")
    page.sees("carl")
    faultless(page)
    page.press("Sign out")
    page.sees("Sign in")
    page.sign_in(token)
    page.sees("user carl")
    page.press("Sign out")
    page.sign_in(pool.create_token("owner", "owner-west"))
    page.go("owner")
    page.sees("Waits of your own users", "Jobs of the month", "Mean wait", "95 of 100 waited at most")
    faultless(page)


def test_the_pages_are_used_by_keyboard_alone(pool: RealPool, new_page: NewPage) -> None:
    """From the token to the end of a job: the tabulator reaches what is needed, and Enter does it."""
    page = new_page(pool.url)
    page.until(lambda: page.focused() == "Token", "the field has the focus")
    page.keys(pool.create_token("user", "kim"), Keys.ENTER)
    page.sees("user kim", "2 sites")
    page.tab_to("Submit")
    page.keys(Keys.ENTER)
    page.until(lambda: page.focused() == "Submit", "the heading has the focus")
    page.tab_to("job.yaml")
    page.driver.switch_to.active_element.send_keys(Keys.CONTROL + "a")
    page.keys(job_text(pool.folder, "keys", 2000).replace("\n", Keys.ENTER))
    page.tab_to("config.json of the model, if the model is a folder")
    page.keys(json.dumps(CONFIG))
    page.tab_to("Submit")
    page.keys(Keys.ENTER)
    page.sees("Choose a plan")
    page.tab_to("Choose p1")
    page.keys(Keys.ENTER)
    page.sees("running")
    page.tab_to("Cancel the job")
    page.keys(Keys.ENTER)
    page.sees("Stop it at all sites?")
    page.tab_to("Yes, cancel it")
    page.keys(Keys.ENTER)
    page.sees("cancelled")
    page.keys(Keys.HOME)
    assert page.driver.find_elements(By.CSS_SELECTOR, "[tabindex]:not([tabindex='0']):not([tabindex='-1'])") == []


def test_strangers_and_others_see_no_page_and_no_job(pool: RealPool, new_page: NewPage) -> None:
    """Every address asks a stranger to sign in; a role's pages do not exist for others, nor do others' jobs."""
    page = new_page(pool.url)
    for name in ("pool", "queue", "jobs", "job/day-1", "submit", "bill", "owner", "operator", "none"):
        page.open(f"#/{name}")
        page.driver.refresh()
        assert "Sign out" not in page.sees("Sign in", "Token")
    page.find("#token").send_keys("wrong" + Keys.ENTER)
    page.sees("no valid token")
    job = pool.call("GET", "/v1/jobs").json()[0]["id"]  # type: ignore[union-attr]
    page.sign_in(pool.create_token("user", "eve"))
    for name in ("operator", "owner", "none"):
        page.go(name)
        page.sees("Not found", "There is no such page")
    page.go(f"job/{job}")
    assert "succeeded" not in page.sees(f"no job '{job}'")
    page.go("jobs")
    page.sees("No job.")


def test_a_page_whose_token_is_revoked_asks_to_sign_in_again(pool: RealPool, new_page: NewPage) -> None:
    """Its stream ends within a second, without a click; a tab that signs out ends the session of the others."""
    page = new_page(pool.url)
    page.sign_in(pool.create_token("user", "rey"))
    page.go("jobs")
    page.sees("Your jobs")
    admin = {"Authorization": f"Bearer {pool.admin_token()}"}
    tokens = httpx.get(f"{pool.url}/v1/tokens", headers=admin).json()
    token = next(one["id"] for one in tokens if one["name"] == "rey" and not one["session_of"])
    assert httpx.post(f"{pool.url}/v1/tokens/{token}/revoke", headers=admin).status_code == 200
    page.sees("The session has ended. Sign in again.")
