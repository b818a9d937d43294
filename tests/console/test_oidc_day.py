"""A person signs in at a provider in a real Chromium, on a server that has read its configuration."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from isthmus.core.files.user_files import load_oidc
from tests.console.chromium import NewPage
from tests.console.stand_in_provider import running_provider
from tests.control.test_stream import Streaming

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
FILE = """\
issuer: %s
client_id: isthmus
client_secret_file: %s
redirect_url: %s
rules:
  - {claim: groups, value: researchers, role: user}
"""


def test_a_person_signs_in_at_the_provider_and_the_address_forgets_its_answer(
    tmp_path: Path, new_page: NewPage
) -> None:
    """By the button, over the provider's page, back to the console; refused with the reason without a group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with running_provider() as provider:
        provider.redirect = f"http://127.0.0.1:{port}/console/"
        secret, file = tmp_path / "secret", tmp_path / "oidc.yaml"
        secret.write_text(f"{provider.secret}\n")
        file.write_text(FILE % (provider.issuer, secret, provider.redirect))
        server = Streaming(tmp_path / "state", port=port, oidc=load_oidc(file))
        try:
            page = new_page(server.url)
            button = f"Sign in at {provider.issuer.removeprefix('http://')}"
            page.press(button)
            page.find("header.bar")
            page.sees("user ann")
            assert page.driver.current_url == f"{server.url}/console/"
            assert page.problems() == []
            page.driver.refresh()
            page.sees("user ann")
            page.press("Sign out")
            provider.claims["groups"] = ["guests"]
            page.press(button)
            page.sees("this pool admits none of your groups")
            assert page.axe() == []
        finally:
            server.stop.set()
            server.thread.join()
