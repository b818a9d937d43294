"""Fixtures of the console's tests: one browser for all of them, skipped visibly where Chromium is not installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from selenium import webdriver

from tests.console import chromium as real


@pytest.fixture(scope="session")
def driver() -> Iterator[webdriver.Chrome]:
    """A real Chromium."""
    if real.CHROMIUM is None or real.DRIVER is None:
        pytest.skip(real.INSTALL)
    with real.chromium() as made:
        yield made


@pytest.fixture
def new_page(driver: webdriver.Chrome) -> Iterator[real.NewPage]:
    """A function that opens the console of a server for a stranger: nothing is stored, no cookie is set."""

    def make(url: str) -> real.Page:
        driver.get(f"{url}/console/")
        driver.execute_script("localStorage.clear()")
        driver.delete_all_cookies()
        page = real.Page(driver, url)
        page.dark(dark=False)
        page.open()
        page.problems()
        return page

    yield make
    driver.get("about:blank")
