"""The chat template that a tokenizer folder brings (Jinja, as transformers renders it)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import TemplateError
from transformers import AutoTokenizer

from isthmus.core.errors import DataError
from isthmus.data.chat import Exchange, Message, Render, plain_template
from isthmus.data.tokenizer import tokenizer_file, tokenizer_settings


def open_template(tokenizer_name: str) -> Render:
    """Return the chat template of tokenizer `tokenizer_name`, or the plain one where it brings none."""
    if tokenizer_name != "bytes":
        folder = tokenizer_file(tokenizer_name).parent
        if "chat_template" in tokenizer_settings(folder) or (folder / "chat_template.jinja").is_file():
            return FolderTemplate(folder)
    return plain_template


class FolderTemplate:
    """The chat template of a tokenizer folder; an answer is what it adds to the prompt that asks for one.

    Some templates rewrite earlier turns as the conversation goes on (they drop reasoning, say). An answer
    whose prompt no longer begins with the turns before begins a run of its own, with that prompt.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{folder}: no chat template, the tokenizer is broken: {error}") from error

    def __call__(self, messages: Sequence[Message]) -> list[list[Exchange]]:
        """Render `messages`; those after the last answer are left out."""
        runs: list[list[Exchange]] = []
        said = ""
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:index], ask=True)
            whole = self._render(messages[: index + 1], ask=False)
            if not whole.startswith(prompt):
                raise DataError(
                    f"chat template of {self._folder} does not put the answer after its prompt",
                    hint="mend the template's add_generation_prompt, or take the template out of the folder",
                )
            if not runs or not prompt.startswith(said):
                runs.append([])
                said = ""
            runs[-1].append(Exchange(prompt=prompt[len(said) :], answer=whole[len(prompt) :], closed=True))
            said = whole
        return runs

    def _render(self, messages: Sequence[Message], *, ask: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=ask
            )
        except (TemplateError, ValueError, TypeError, IndexError, KeyError) as error:
            raise DataError(f"chat template of {self._folder} refuses {messages!r:.120}: {error}") from error
        return text
