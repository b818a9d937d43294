"""Where the server's address and the token come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.cli.app.cli_reference import all_commands
from isthmus.client.client_settings import DEFAULT_SERVER, ClientSettings, context_path, resolve_settings
from isthmus.core.errors import FileError, InputError
from tests.cli.fake_server import FakeServer, run


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment with a context file."""
    (tmp_path / "t").write_text("from-context\n")
    folder = tmp_path / ".config" / "isthmus"
    folder.mkdir(parents=True)
    (folder / "context.yaml").write_text(f"server: https://context\ntoken_file: {tmp_path}/t\nca: /ca.pem\n")
    return {"HOME": str(tmp_path)}


def test_options_come_before_the_environment_before_the_context(home: dict[str, str], tmp_path: Path) -> None:
    """Each source is asked only for what the ones before it left open."""
    (tmp_path / "o").write_text("from-option")
    (tmp_path / "e").write_text("from-environment")
    assert resolve_settings(home) == ClientSettings("https://context", "from-context", Path("/ca.pem"))
    environ = home | {"ISTHMUS_SERVER": "https://env", "ISTHMUS_TOKEN_FILE": str(tmp_path / "e")}
    assert resolve_settings(environ) == ClientSettings("https://env", "from-environment", Path("/ca.pem"))
    assert resolve_settings(environ | {"ISTHMUS_TOKEN": "direct"}).token == "direct"
    given = resolve_settings(
        environ | {"ISTHMUS_TOKEN": "direct"}, server="https://o", token_file=tmp_path / "o", ca=Path("/x")
    )
    assert given == ClientSettings("https://o", "from-option", Path("/x"))


def test_with_nothing_set_it_is_this_machine_without_a_token(tmp_path: Path) -> None:
    """`isthmus serve` and the commands meet at the default port."""
    assert resolve_settings({"HOME": str(tmp_path)}) == ClientSettings(DEFAULT_SERVER, None, None)
    assert context_path({"XDG_CONFIG_HOME": "/x", "HOME": "/h"}) == Path("/x/isthmus/context.yaml")


@pytest.mark.parametrize("text", ["- a", "token: secret", "server: 3", "a: [", "server: [x]"])
def test_a_bad_context_file_is_named(home: dict[str, str], text: str) -> None:
    """The error names the file, and a token in it is not repeated in the message."""
    context_path(home).write_text(text)
    with pytest.raises(FileError, match=r"context\.yaml") as caught:
        resolve_settings(home)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"", b" \n", b"two words", b"\xff\xfe", "…".encode()])
def test_a_token_file_without_a_token_is_named(tmp_path: Path, content: bytes | None) -> None:
    """Missing, empty or garbled: the user can mend it."""
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match="token file"):
        resolve_settings({"HOME": str(tmp_path)}, token_file=file)


def test_a_token_is_never_an_option() -> None:
    """Anyone on the machine can read a command line."""
    for _, command in all_commands():
        assert "--token" not in {word for parameter in command.params for word in parameter.opts}


def test_options_reach_the_client(tmp_path: Path) -> None:
    """A wrong token in the file that the option names is refused by the server (exit 4)."""
    (tmp_path / "t").write_text("wrong")
    assert run(FakeServer(), "jobs", "--token-file", tmp_path / "t").status == 4
    assert run(FakeServer(), "jobs", "--server", "http://10.1.1.1:1").status == 2
