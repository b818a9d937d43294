"""The chat template of a job: where it comes from, and rendering in a limited process (`chat_renderer.py`)."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from isthmus.core.errors import DataError
from isthmus.core.files.model_tokenizer import TEMPLATE_FILE, missing_template, tokenizer_file
from isthmus.core.job import BYTES_TOKENIZER, MAX_TEMPLATE_CHARS, PLAIN_TEMPLATE, DataConfig, is_template_text
from isthmus.data.chat import ChatMessage, Turn
from isthmus.data.tokenizer import tokenizer_settings

PLAIN_TEMPLATE_TEXT = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""The built-in template: see `chat.py`."""
_RENDERER = Path(__file__).with_name("chat_renderer.py")


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A chat template in Jinja."""

    text: str
    origin: str
    """Where it comes from: a file, the job or `plain`."""
    tokens: dict[str, str]
    """Special tokens by the name under which a template sees them, such as `eos_token`."""

    def __str__(self) -> str:
        digest = hashlib.sha256(self.text.encode(errors="replace")).hexdigest()[:12]
        return f"chat template {self.origin}: {len(self.text)} characters, sha256 {digest}"


@dataclass(frozen=True, kw_only=True)
class RenderLimits:
    """Limits of the process that renders a template."""

    memory_bytes: int = 1 << 30
    cpu_s: float = 10.0
    """CPU time for one conversation."""
    chars: int = 1 << 24
    """Characters that one conversation may become."""


def find_chat_template(data: DataConfig, special_tokens: dict[str, str]) -> ChatTemplate:
    """Return the template of `data`, else that of its tokenizer; `DataError` if both lack one."""
    given, tokenizer, tokens = data.chat_template, data.tokenizer, special_tokens
    if given == PLAIN_TEMPLATE:
        return ChatTemplate(text=PLAIN_TEMPLATE_TEXT, origin=PLAIN_TEMPLATE, tokens=tokens)
    if given is not None:
        if not is_template_text(given):
            raise DataError(f"chat_template {given!r:.80} is not a Jinja template", hint="it contains {{ or {%")
        return ChatTemplate(text=given, origin="of the job", tokens=tokens)
    found = None if tokenizer == BYTES_TOKENIZER else _template_of(tokenizer_file(tokenizer).parent)
    if found is None:
        raise missing_template(tokenizer)
    origin, text = found
    if len(text) > MAX_TEMPLATE_CHARS:
        raise DataError(
            f"chat template {origin} has {len(text):,} characters, at most {MAX_TEMPLATE_CHARS:,} are allowed",
            hint="set data.chat_template to a shorter one",
        )
    return ChatTemplate(text=text, origin=f"of {origin}", tokens=tokens)


def _template_of(folder: Path) -> tuple[str, str] | None:
    """Return the template of a tokenizer folder and its file, or None."""
    file = folder / TEMPLATE_FILE
    if file.is_file():
        try:
            with file.open(encoding="utf-8") as stream:
                return str(file), stream.read(MAX_TEMPLATE_CHARS + 1)
        except (OSError, ValueError) as error:
            raise DataError(f"{file} cannot be read: {error}", hint="a chat template is UTF-8 text") from error
    value = tokenizer_settings(folder).get("chat_template")
    if isinstance(value, list):  # several templates by name
        named = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
        value = named.get("default")
    return (str(folder / "tokenizer_config.json"), value) if isinstance(value, str) and value else None


class ChatRenderer:
    """Renders conversations; a context manager that holds the renderer's process.

    An answer is the text that it adds to the generation prompt. Some templates rewrite earlier turns as the
    conversation continues, for example to drop reasoning. An answer whose prompt does not extend the previous
    turns starts a new run.
    """

    def __init__(self, template: ChatTemplate, limits: RenderLimits | None = None) -> None:
        self._template, self._limits = template, limits or RenderLimits()
        self._process = subprocess.Popen(  # noqa: S603 - this Python with a file of this package
            [sys.executable, "-I", str(_RENDERER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        self._request({"template": template.text, "tokens": template.tokens, "limits": vars(self._limits)})

    def __enter__(self) -> ChatRenderer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def __call__(self, messages: Sequence[ChatMessage]) -> list[list[Turn]]:
        """Render `messages`; drop those after the last answer. Raises `DataError` if the template cannot."""
        runs: list[list[Turn]] = []
        rendered = ""
        for prompt, with_answer in self._render(messages):
            if not with_answer.startswith(prompt):
                raise DataError(
                    f"{self._template} does not render the answer after its prompt",
                    hint="fix add_generation_prompt in the template, or set data.chat_template",
                )
            if not runs or not prompt.startswith(rendered):
                runs.append([])
                rendered = ""
            runs[-1].append(Turn(prompt=prompt[len(rendered) :], answer=with_answer[len(prompt) :]))
            rendered = with_answer
        return runs

    def _render(self, messages: Sequence[ChatMessage]) -> list[tuple[str, str]]:
        self._request(list(messages))
        # In JSON a character takes up to 12 bytes; what is longer than the limit is cut and rejected below.
        line = cast("IO[str]", self._process.stdout).readline(12 * self._limits.chars + 4096)
        if not line:
            self._process.wait()
            limit = f"{self._limits.cpu_s:g} s of CPU time or {self._limits.memory_bytes >> 20} MiB for a conversation"
            raise DataError(f"{self._template} needs more than {limit}", hint="set data.chat_template to another one")
        answer = json.loads(line)
        if "error" in answer:
            raise DataError(
                f"{self._template} rejects {messages!r:.120}: {answer['error']}",
                hint="fix the data or the template, or set data.chat_template",
            )
        return [(prompt, answered) for prompt, answered in answer["turns"]]

    def _request(self, value: Any) -> None:
        requests = cast("IO[str]", self._process.stdin)
        try:
            requests.write(json.dumps(value) + "\n")
            requests.flush()
        except BrokenPipeError:
            return  # the process has ended; the read that follows says so
