"""Words of users, workers and agents in a real Chromium: shown as they are, never run, never laid out as HTML."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from isthmus.core.messages.agent_messages import LogChunk, ObservedPart, StepMetrics
from isthmus.core.text.printable import printable
from tests.console.chromium import NewPage
from tests.control.serving import EAST, WEST, report
from tests.control.test_stream import Streaming

pytestmark = [pytest.mark.attack, pytest.mark.slow]
ATTACKS = (
    "<img src=x onerror=\"document.title='owned'\">",
    "<script>document.title='owned'</script>",
    "<svg/onload=document.title='owned'>",
    "javascript:document.title='owned'",
    "</pre><h1>owned</h1>",
    "${document.title='owned'}",
)
"""Ways by which a text becomes a script or an element (OWASP XSS Prevention)."""
HIDDEN = "left\u202eright \x1b[31mred\x07"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Streaming]:
    """A real server in a thread."""
    made = Streaming(tmp_path_factory.mktemp("server"))
    yield made
    made.close()


def test_words_of_others_are_text_on_every_page(server: Streaming, new_page: NewPage) -> None:
    """Regions and details of a site, output of workers, idempotency keys, names: all of them attack, none runs."""
    words = " ".join(ATTACKS) + HIDDEN
    sites = [site.model_copy(update={"region": words[:60]}) for site in (EAST, WEST)]

    def sync(site: object, *parts: ObservedPart, **fields: object) -> None:
        body = report(site, *parts, **fields).model_dump(mode="json")  # type: ignore[arg-type]
        name = site.name  # type: ignore[attr-defined]
        answer = server.call("POST", f"/v1/agents/{name}/sync", f"owner-{name}", body)
        assert answer.status_code == 200, answer.text

    for site in sites:
        sync(site)
    job = server.submit()
    for _ in range(100):
        if server.call("GET", f"/v1/jobs/{job}").json()["state"] == "preparing":
            break
        for site in sites:
            sync(site)
    part = ObservedPart(job=job, attempt=1, state="prepared", detail=words[:200])
    for site in (*sites, *sites):
        sync(site, part)
    running = ObservedPart(job=job, attempt=1, state="running", detail=words[:200])
    chunk = LogChunk(job=job, attempt=1, rank=0, offset=0, text=words + "\n")
    metrics = StepMetrics(job=job, attempt=1, rank=0, step=0, values={"loss": 3.0, words[:40]: 1.0})
    sync(sites[0], running, logs=(chunk,), metrics=(metrics,))
    server.call("POST", "/v1/tokens", "root", {"role": "user", "name": "dan"})

    page = new_page(server.url)
    page.sign_in(server.tokens["ann"])
    page.go(f"job/{job}")
    text = page.sees("onerror=", "</pre><h1>owned</h1>", "${document.title='owned'}", "<U+202E>", "\\x1b[31m")
    assert "\u202e" not in text
    for name in ("pool", "queue", "jobs", "submit", "bill", f"job/{ATTACKS[0]}", f"job/{HIDDEN}", ATTACKS[1]):
        page.go(name)
        page.sees("Sign out")
        assert "owned" not in page.driver.title
        made = "return document.querySelectorAll('img, iframe, object, script:not([src])').length"
        assert page.driver.execute_script(made) == 0
    page.press("Sign out")
    page.sign_in(server.tokens["owner-east"])
    page.go("owner")
    page.sees("<img src=x onerror=")
    assert "owned" not in page.driver.title
    assert page.problems() == [], "nothing was even tried that the policy refuses"


def test_the_policy_refuses_what_a_mistake_of_the_console_would_let_through(
    server: Streaming, new_page: NewPage
) -> None:
    """Inline scripts, handlers, text as HTML, code from text, and requests to other hosts end at the browser."""
    page = new_page(server.url)
    page.sees("Sign in")
    tried = page.driver.execute_async_script(
        """
        const done = arguments[arguments.length - 1];
        const refused = {};
        const attempt = (name, act) => {
          try { act(); refused[name] = false; } catch { refused[name] = true; }
        };
        setTimeout(() => {  // outside of the driver's own script, which the policy does not bind
          attempt("innerHTML", () => { document.createElement("div").innerHTML = "<b>x</b>"; });
          attempt("write", () => { document.write("x"); });
          attempt("script", () => { document.createElement("script").text = "1"; });
          attempt("handler", () => { document.body.setAttribute("onclick", "1"); });
          attempt("eval", () => { (0, eval)("1"); });
          attempt("Function", () => { new Function("return 1")(); });
          done(refused);
        });
        """
    )
    assert tried == dict.fromkeys(("innerHTML", "write", "script", "handler", "eval", "Function"), True)
    outcome = page.driver.execute_async_script(
        """
        const done = arguments[arguments.length - 1];
        fetch("http://127.0.0.1:9/").then(() => done("sent"), () => done("refused"));
        """
    )
    assert outcome == "refused"
    assert page.driver.execute_script("return document.cookie") == "", "no script reads the session"


def test_the_console_shows_hidden_characters_as_python_does(server: Streaming, new_page: NewPage) -> None:
    """`printable` of the pages and of the package agree on every code point."""
    page = new_page(server.url)
    page.sees("Sign in")
    found = page.driver.execute_async_script(
        """
        const [last, done] = arguments;
        import("./lib/text.js").then(({ printable }) => {
          const changed = [];
          for (let at = 0; at <= last; at += 1) {
            const text = printable(String.fromCodePoint(at), "");
            if (text !== String.fromCodePoint(at)) changed.push([at, text]);
          }
          done(changed.length + ":" + changed.map(([at, text]) => `${at} ${text}`).join(";"));
        });
        """,
        0xFFFF,
    )
    own = [(at, printable(chr(at))) for at in range(0x10000) if printable(chr(at)) != chr(at)]
    assert found == f"{len(own)}:" + ";".join(f"{at} {text}" for at, text in own)
    hidden = {at for at in range(0x10000, sys.maxunicode + 1) if printable(chr(at)) != chr(at)}
    borders = {at for at in hidden if at - 1 not in hidden or at + 1 not in hidden}
    edges = sorted(one for at in borders for one in (at - 1, at, at + 1) if 0x10000 <= one <= sys.maxunicode)
    shown = page.driver.execute_async_script(
        "const [points, done] = arguments; import('./lib/text.js').then(({printable}) =>"
        " done(points.map((one) => printable(String.fromCodePoint(one)))))",
        edges,
    )
    assert shown == [printable(chr(at)) for at in edges]
