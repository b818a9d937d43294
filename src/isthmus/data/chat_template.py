"""The chat template of a tokenizer folder (Jinja, rendered by transformers)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import TemplateError
from transformers import AutoTokenizer

from isthmus.core.errors import DataError
from isthmus.data.chat import ChatMessage, ChatTemplate, Turn, plain_template
from isthmus.data.tokenizer import tokenizer_file, tokenizer_settings


def open_chat_template(tokenizer_name: str) -> ChatTemplate:
    """Return the chat template of tokenizer `tokenizer_name`, or `plain_template` if it has none."""
    if tokenizer_name != "bytes":
        folder = tokenizer_file(tokenizer_name).parent
        if "chat_template" in tokenizer_settings(folder) or (folder / "chat_template.jinja").is_file():
            return TokenizerTemplate(folder)
    return plain_template


class TokenizerTemplate:
    """The chat template of a tokenizer folder; an answer is the text that it adds to the generation prompt.

    Some templates rewrite earlier turns as the conversation continues, for example to drop reasoning. An
    answer whose prompt does not extend the previous turns starts a new run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{folder}: cannot load the tokenizer for its chat template: {error}") from error

    def __call__(self, messages: Sequence[ChatMessage]) -> list[list[Turn]]:
        """Render `messages`; drop those after the last answer."""
        runs: list[list[Turn]] = []
        rendered = ""
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:index], generation_prompt=True)
            with_answer = self._render(messages[: index + 1], generation_prompt=False)
            if not with_answer.startswith(prompt):
                raise DataError(
                    f"chat template of {self._folder} does not render the answer after its prompt",
                    hint="fix add_generation_prompt in the template, or remove the template from the folder",
                )
            if not runs or not prompt.startswith(rendered):
                runs.append([])
                rendered = ""
            runs[-1].append(Turn(prompt=prompt[len(rendered) :], answer=with_answer[len(prompt) :], ends_turn=True))
            rendered = with_answer
        return runs

    def _render(self, messages: Sequence[ChatMessage], *, generation_prompt: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generation_prompt
            )
        except (TemplateError, ValueError, TypeError, IndexError, KeyError) as error:
            raise DataError(f"chat template of {self._folder} rejects {messages!r:.120}: {error}") from error
        return text
