"""The web console before a long queue: first content, clicks, and events on many pages at once.

A server has 1,000,000 queued jobs and 50 sites with 10,000 nodes, all in use (`benchmarks/_console_server.py`). A real
Chromium shows the pages; times are taken inside of them.

`settled`: what a start leaves for later, and does while requests wait: the index of folders at the first submission,
and the first snapshot of the state. It comes first, so that the other parts meet a server that has served for a while.

`pages`: from the address to the first rows of the queue, of the jobs and of the pool, each in a browser that has the
session and the files; and from a click to the rows of another page of the queue, at random places.

`events`: one Chromium shows the jobs; other pages are open as the console opens them, each an event stream of an
admin. Jobs are submitted one after another; a page's time counts from the event that is made before it is durable, so
the figure holds for the time after it was durable as well.

Wall times are those of a machine that does nothing else; CPU seconds of the server stand beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

from benchmarks.control_core import submission
from benchmarks.table import Row, print_rows, run_parts
from tests.console.chromium import CHROMIUM, DRIVER, INSTALL, Page, chromium

JOBS, QUICK_JOBS = 1_000_000, 5_000
OPENINGS, QUICK_OPENINGS = 20, 3
CLICKS, QUICK_CLICKS = 200, 20
EVENTS, QUICK_EVENTS = 50, 5
PAGES, QUICK_PAGES = 200, 20
STREAMS_OF_A_NAME = 40
MAX_FIRST_S, MAX_CLICK_S, MAX_EVENT_S = 1.0, 0.2, 0.5
SETTLED_S = 15.0
"""A server has settled once its requests were answered at once for this long."""
_SHOWN = """
const [css, wanted, done] = arguments;
const look = () => {
  const found = document.querySelector(css);
  if (found && found.innerText.includes(wanted)) done(performance.now() / 1000);
  else requestAnimationFrame(look);
};
look();
"""
_CLICKED = """
const [place, done] = arguments;
const begun = performance.now();
const field = document.querySelector(".pager input");
field.value = place;
field.form.requestSubmit();
const look = () => {
  const first = document.querySelector("tbody td")?.innerText.replaceAll(",", "");
  if (first === String(place)) done((performance.now() - begun) / 1000);
  else requestAnimationFrame(look);
};
look();
"""
_WATCH = """
window.seen = {};
new MutationObserver(() => {
  for (const row of document.querySelectorAll("tbody tr")) {
    const id = row.querySelector("a")?.innerText;
    if (id && !(id in window.seen)) window.seen[id] = Date.now() / 1000;
  }
}).observe(document.querySelector("main"), {childList: true, subtree: true, characterData: true});
"""


class Served(NamedTuple):
    """A running server: its process, its URL, its admin token, and the CPU seconds of its start."""

    process: psutil.Process
    url: str
    token: str
    start_cpu_s: float
    rss_bytes: float

    def cpu_s(self) -> float:
        """Return the CPU seconds that the server has used."""
        used = self.process.cpu_times()
        return float(used.user + used.system)

    def call(self, method: str, path: str, body: object = None) -> httpx.Response:
        """Send a request as the admin."""
        headers = {"Authorization": f"Bearer {self.token}"}
        answer = httpx.request(method, self.url + path, json=body, headers=headers, timeout=60)
        answer.raise_for_status()
        return answer


@contextmanager
def served(num_jobs: int) -> Iterator[Served]:
    """Start a server with `num_jobs` queued jobs; end it at the end."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "benchmarks._console_server", folder, str(num_jobs)]
        child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONHASHSEED": "0"})
        try:
            line = child.stdout.readline() if child.stdout else ""
            if not line:
                raise RuntimeError(f"the server ended with status {child.wait()}")
            found = json.loads(line)
            token = (Path(folder) / "admin.token").read_text().strip()
            yield Served(psutil.Process(child.pid), found["url"], token, found["cpu_s"], found["rss_bytes"])
        finally:
            child.terminate()
            child.wait(60)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure_pages(server: Served, num_jobs: int, openings: int, clicks: int) -> list[Row]:
    """Time first contents and clicks in a browser."""
    rows = []
    with chromium() as driver:
        page = Page(driver, server.url)
        page.open()
        page.sign_in(server.token)
        for name, css, wanted in (
            ("queue", "#length", "jobs"),
            ("jobs", "tbody", "job-"),
            ("pool", "#summary", "nodes"),
        ):
            times, before_s = [], server.cpu_s()
            for _ in range(openings):
                driver.get("about:blank")
                page.open(f"#/{name}")
                times.append(float(driver.execute_async_script(_SHOWN, css, wanted)))
            cpu_s = (server.cpu_s() - before_s) / openings
            worst_s = percentile(times, 0.99)
            rows.append(
                Row(
                    what=f"{name}: first content with {num_jobs:,} queued jobs, {openings} openings, p99 "
                    f"(median {percentile(times, 0.5):.3f} s, {cpu_s * 1e3:.0f} CPU-ms of the server)",
                    ours=worst_s, unit="s", target="1", met=worst_s <= MAX_FIRST_S,
                )
            )  # fmt: skip
        page.go("queue")
        page.find(".pager input")
        length = int(page.find("#length").text.split()[0].replace(",", ""))
        chance, times, before_s = random.Random(2), [], server.cpu_s()
        places = [1 + 50 * chance.randrange(length // 50) for _ in range(clicks)]
        for place in places:
            times.append(float(driver.execute_async_script(_CLICKED, place)))
        cpu_s = (server.cpu_s() - before_s) / clicks
        worst_s = percentile(times, 0.99)
        rows.append(
            Row(
                what=f"click to another page of {length:,} queued jobs, {clicks} at random places, p99 "
                f"(median {percentile(times, 0.5) * 1e3:.0f} ms, {cpu_s * 1e3:.0f} CPU-ms of the server)",
                ours=worst_s * 1e3, unit="ms", target="200", met=worst_s <= MAX_CLICK_S,
            )
        )  # fmt: skip
    return rows


def measure_start(server: Served, num_jobs: int) -> list[Row]:
    """Return what a start costs, and how long requests wait until it has settled: for `SETTLED_S` none waited long."""
    chance, longest_s, number, quiet_since_s = random.Random(4), 0.0, 0, time.monotonic()
    while time.monotonic() - quiet_since_s < SETTLED_S:
        begun_s = time.monotonic()
        server.call("POST", "/v1/jobs", submission(num_jobs + number, chance).model_dump(mode="json"))
        now_s, number = time.monotonic(), number + 1
        longest_s = max(longest_s, now_s - begun_s)
        if now_s - begun_s > MAX_CLICK_S:
            quiet_since_s = now_s
        time.sleep(0.2)
    return [
        Row(what=f"start with {num_jobs:,} queued jobs, CPU", ours=server.start_cpu_s, unit="CPU-s"),
        Row(what=f"memory of the server with {num_jobs:,} queued jobs", ours=server.rss_bytes / 1e9, unit="GB"),
        Row(
            what=f"longest wait of a request behind the first submission and snapshot after a start, {num_jobs:,} jobs",
            ours=longest_s, unit="s",
        ),
    ]  # fmt: skip


class Pages(threading.Thread):
    """Event streams as pages of the console hold them; `seen`: first events of jobs, delays in s."""

    def __init__(self, url: str, tokens: Sequence[str], count: int) -> None:
        super().__init__(daemon=True)
        self.url, self.tokens, self.count = url, tokens, count
        self.seen: list[tuple[str, float]] = []
        self.num_open = 0
        self.ended = threading.Event()

    def run(self) -> None:
        """Read all streams until `ended`."""
        asyncio.run(self._read_all())

    async def _read_all(self) -> None:
        limits = httpx.Limits(max_connections=self.count + 1)
        async with httpx.AsyncClient(timeout=None, limits=limits) as client:
            tasks = [asyncio.create_task(self._read(client, at)) for at in range(self.count)]
            while not self.ended.is_set():
                await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, client: httpx.AsyncClient, at: int) -> None:
        headers = {"Authorization": f"Bearer {self.tokens[at % len(self.tokens)]}"}
        known: set[str] = set()
        async with client.stream("GET", f"{self.url}/v1/events", headers=headers) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line == "event: hello":
                    self.num_open += 1
                if line.startswith('data: {"id"'):
                    now_s, job = time.time(), json.loads(line[6:])
                    if job["id"] not in known and "submitted_s" in job:
                        known.add(job["id"])
                        self.seen.append((job["id"], now_s - job["submitted_s"]))


def measure_events(server: Served, num_jobs: int, pages: int, events: int) -> list[Row]:
    """Time events on a page of a browser and on many streams beside it."""
    names = [f"admin-{number}" for number in range(-(-pages // STREAMS_OF_A_NAME))]
    tokens = [server.call("POST", "/v1/tokens", {"role": "admin", "name": name}).json()["token"] for name in names]
    streams = Pages(server.url, tokens, pages - 1)
    chance, delays, jobs = random.Random(3), list[float](), set[str]()
    with chromium() as driver:
        page = Page(driver, server.url)
        page.open()
        page.sign_in(server.token)
        page.go("jobs")
        page.sees("job-")
        streams.start()
        while streams.num_open < pages - 1:
            time.sleep(0.1)
        driver.execute_script(_WATCH)
        before_s = server.cpu_s()
        for number in range(events):
            sent = submission(num_jobs + 10_000 + number, chance).model_dump(mode="json")
            job = server.call("POST", "/v1/jobs", sent).json()
            at_s = page.until(lambda one=job["id"]: driver.execute_script("return window.seen[arguments[0]]", one))
            jobs.add(job["id"])
            delays.append(float(at_s) - job["submitted_s"])
            time.sleep(0.2)
        cpu_s = (server.cpu_s() - before_s) / events
        streams.ended.set()
        streams.join()
    seen = [delay_s for job_id, delay_s in streams.seen if job_id in jobs]
    missing = (pages - 1) * events - len(seen)
    worst_s, page_s, median_s = percentile(seen, 0.99), percentile(delays, 0.99), percentile(seen, 0.5)
    return [
        Row(
            what=f"an event on {pages} open pages, {events} events, p99 (median {median_s * 1e3:.0f} ms, "
            f"{cpu_s * 1e3:.0f} CPU-ms of the server for an event on all of them)",
            ours=worst_s * 1e3, unit="ms", target="500", met=worst_s <= MAX_EVENT_S,
        ),
        Row(what="the same, drawn in Chromium, p99", ours=page_s * 1e3, unit="ms", target="500",
            met=page_s <= MAX_EVENT_S),
        Row(what="the same, events that did not reach a page", ours=float(missing), unit="events", target="0",
            met=missing == 0),
    ]  # fmt: skip


def main() -> int:
    """Measure the chosen parts and print the rows; the exit status tells whether all targets are met."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", action="append", choices=("settled", "pages", "events"), help="one part")
    parser.add_argument("--jobs", type=int, default=None, help=f"queued jobs (default {JOBS:,})")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_JOBS:,} jobs, few clicks, events and pages")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    if CHROMIUM is None or DRIVER is None:
        print(INSTALL, file=sys.stderr)
        return 2
    num_jobs = options.jobs or (QUICK_JOBS if options.quick else JOBS)
    openings, clicks = (QUICK_OPENINGS, QUICK_CLICKS) if options.quick else (OPENINGS, CLICKS)
    pages, events = (QUICK_PAGES, QUICK_EVENTS) if options.quick else (PAGES, EVENTS)
    with served(num_jobs) as server:
        parts = {
            "settled": lambda: measure_start(server, num_jobs),
            "pages": lambda: measure_pages(server, num_jobs, openings, clicks),
            "events": lambda: measure_events(server, num_jobs, pages, events),
        }
        rows = run_parts(parts, options.only or tuple(parts))
    print_rows(rows, options.json)
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
