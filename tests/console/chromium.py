"""A real Chromium for the tests of the console, driven over WebDriver (W3C) by selenium."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
INSTALL = "no Chromium; to install it: sudo apt-get install -y chromium chromium-driver"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)
AXE = Path(__file__).parent / "vendor" / "axe.min.js"
WAIT_S = 90.0
Found = TypeVar("Found")


class Page:
    """One window of a browser, on the console of the server at `url`. Waits end with a test's error."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver, self.url = driver, url

    def open(self, path: str = "") -> None:
        """Show a page of the console, by its address."""
        self.driver.get(f"{self.url}/console/{path}")

    def go(self, path: str) -> None:
        """Show a page without loading the console again."""
        self.driver.execute_script(f"location.hash = {json.dumps('#/' + path)}")

    def until(self, found: Callable[[], Found], what: str = "") -> Found:
        """Return what `found` returns once it is true; elements that were replaced meanwhile are looked up again."""
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                if result := found():
                    return result
            except StaleElementReferenceException:
                pass
            if time.monotonic() > deadline:
                raise AssertionError(f"not seen within {WAIT_S:g} s: {what}; the page says: {self.text()[:3000]}")
            time.sleep(0.03)

    def text(self) -> str:
        """Return the visible text of the page."""
        return str(self.driver.execute_script("return document.body.innerText"))

    def sees(self, *words: str) -> str:
        """Wait until the page shows all words; return its text."""

        def all_there() -> str:
            text = self.text()
            return text if all(word in text for word in words) else ""

        return self.until(all_there, repr(words))

    def find(self, css: str) -> WebElement:
        """Return the first element of a selector, once there is one."""
        return self.until(lambda: (self.driver.find_elements(By.CSS_SELECTOR, css) or [None])[0], css)  # type: ignore[list-item]

    def button(self, label: str) -> WebElement:
        """Return the button with a label or name, once it can be used."""
        path = f"//button[normalize-space()='{label}' or @aria-label='{label}'][not(@disabled)]"
        return self.until(lambda: (self.driver.find_elements(By.XPATH, path) or [None])[0], label)  # type: ignore[list-item]

    def press(self, label: str) -> None:
        """Click a button."""
        self.button(label).click()

    def fill(self, css: str, text: str) -> None:
        """Replace the text of a field, as a person pastes it."""
        self.driver.execute_script(
            "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input', {bubbles: true}))",
            self.find(css),
            text,
        )

    def keys(self, *keys: str) -> None:
        """Press keys on the element that has the focus."""
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()

    def focused(self) -> str:
        """Return the name of the element that has the focus: its label, or its text."""
        return str(
            self.driver.execute_script(
                "const e = document.activeElement;"
                "return e.getAttribute('aria-label') || e.labels?.[0]?.innerText || e.innerText || e.id || e.tagName"
            )
        ).strip()

    def tab_to(self, name: str, most: int = 120) -> None:
        """Press the tabulator until the focus is on the element of this name."""
        seen = []
        for _ in range(most):
            self.keys(Keys.TAB)
            seen.append(self.focused())
            if seen[-1] == name:
                return
        raise AssertionError(f"no element '{name}' is reached by the tabulator: {seen}")

    def sign_in(self, token: str) -> None:
        """Sign in on the page that asks for a token."""
        self.find("#token").send_keys(token + Keys.ENTER)
        self.find("header.bar")

    def axe(self) -> list[str]:
        """Return what axe finds on the page: rule, impact, and the first elements that break it."""
        self.driver.execute_script(AXE.read_text(encoding="utf-8") if not self._has_axe() else "")
        found: dict[str, Any] = self.driver.execute_async_script(
            "const done = arguments[arguments.length - 1]; axe.run(document, {resultTypes: ['violations']}).then(done)"
        )
        return [
            f"{one['id']} ({one['impact']}): {[node['html'][:200] for node in one['nodes'][:3]]}"
            for one in found["violations"]
        ]

    def _has_axe(self) -> bool:
        return bool(self.driver.execute_script("return typeof axe !== 'undefined'"))

    def problems(self) -> list[str]:
        """Return errors of scripts and of the page's policy since the last call; a lost server is none."""
        entries = self.driver.get_log("browser")
        return [
            one["message"]
            for one in entries
            if one["level"] == "SEVERE" and "Failed to load" not in one["message"] and "net::ERR" not in one["message"]
        ]

    def picture(self, file: Path, width: int = 1280, most: int = 2400) -> None:
        """Write the page as a PNG, whole up to a height of `most` pixels."""
        height = int(self.driver.execute_script("return document.documentElement.scrollHeight"))
        self.driver.set_window_size(width, min(most, max(600, height)))
        self.driver.execute_script("window.scrollTo(0, 0)")
        time.sleep(0.4)  # charts follow the size
        file.parent.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(file))
        self.driver.set_window_size(1280, 900)

    def dark(self, *, dark: bool) -> None:
        """Show the page as to a person who prefers dark or light pages."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


NewPage = Callable[[str], Page]
"""Opens the console of the server at a URL in a browser that has never seen it."""


@contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """A browser with an empty profile; at the end it and its profile are gone."""
    with tempfile.TemporaryDirectory(prefix="chromium-") as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for flag in (*FLAGS, f"--user-data-dir={profile}", "--window-size=1280,900"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
        try:
            yield driver
        finally:
            driver.quit()
