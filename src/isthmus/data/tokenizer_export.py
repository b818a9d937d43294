"""`export_tokenizer`: writes the tokenizer and the chat template of a job into the folder of its result."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from isthmus.core.files.model_tokenizer import TOKENIZER_FILE, TOKENIZER_FILES, tokenizer_file
from isthmus.core.job import BYTES_TOKENIZER
from isthmus.data.byte_tokenizer import write_byte_tokenizer
from isthmus.data.chat_template import TEMPLATE_FILE, ChatTemplate
from isthmus.data.tokenizer import tokenizer_settings


def export_tokenizer(output: Path, tokenizer: str, template: ChatTemplate | None = None) -> None:
    """Write the files of `tokenizer` (`bytes` or a path) to `output`, with the chat template that training used.

    Tokenizer files of an earlier export are removed. Raises `OSError` if the folder cannot be written.
    """
    file = tokenizer_file(tokenizer)
    if tokenizer == BYTES_TOKENIZER or file.parent.resolve() != output.resolve():
        for name in TOKENIZER_FILES:
            (output / name).unlink(missing_ok=True)
        if tokenizer == BYTES_TOKENIZER:
            write_byte_tokenizer(output)
        else:
            _copy_tokenizer(file, output)
    if template is not None:
        settings = template.tokens | tokenizer_settings(output) | {"chat_template": template.text}
        _write(output / "tokenizer_config.json", json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        _write(output / TEMPLATE_FILE, template.text)


def _copy_tokenizer(file: Path, output: Path) -> None:
    for name in TOKENIZER_FILES:
        if (file.parent / name).is_file():
            shutil.copyfile(file.parent / name, output / name)
    shutil.copyfile(file, output / TOKENIZER_FILE)


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8", errors="replace")
