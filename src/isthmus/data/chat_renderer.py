"""Renders a chat template in a process of its own: `python -I chat_renderer.py`, requests on standard input.

A template is a program of its author. It runs in Jinja's `ImmutableSandboxedEnvironment`, with the names that
transformers gives to it, under limits of memory and CPU time that end the process. The first line is
`{"template", "tokens", "limits": {"memory_bytes", "cpu_s", "chars"}}`, every other one a list of messages. Each line is
answered by a JSON line: `{"turns": [[prompt, prompt and answer], ...]}` or `{"error": text}`.

This file imports nothing of Isthmus, so that the process starts in 0.1 s without torch.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

TODAY = datetime(2024, 7, 26)  # noqa: DTZ001
"""The date that templates see: the data must not depend on the day of the run."""


class GenerationBlock(Extension):
    """Renders the body of `{% generation %}`, which marks answers for other tools."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateDict:
    """`dict` as a function, without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Return a dict."""
        return dict(*args, **kwargs)


class TemplateNamespace(Namespace):
    """A namespace that rejects names with a leading underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        """Set an attribute."""
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: rename the attribute")


def compile_template(text: str) -> Template:
    """Return the compiled template."""

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **rest: Any) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **rest)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": TODAY.strftime,
        "dict": TemplateDict(),
        "namespace": TemplateNamespace,
    }
    return environment.from_string(text)


def render_turns(template: Template, tokens: dict[str, str], messages: list[Any], max_chars: int) -> list[list[str]]:
    """Return for each answer the rendered prompt, and the rendered prompt with the answer."""
    turns, num_chars = [], 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = template.render(messages=messages[:index], add_generation_prompt=True, **tokens)
        answered = template.render(messages=messages[: index + 1], add_generation_prompt=False, **tokens)
        turns.append([prompt, answered])
        num_chars += len(prompt) + len(answered)
        if num_chars > max_chars:
            raise ValueError(f"it renders more than {max_chars:,} characters of one conversation")
    return turns


def main() -> None:
    """Answer requests until standard input ends."""
    setting = json.loads(sys.stdin.readline())
    limits = setting["limits"]
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory_bytes"],) * 2)
    template: Template | None = None
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, limits["cpu_s"])  # the default action of SIGPROF ends the process
        try:
            template = template or compile_template(setting["template"])
            turns = render_turns(template, setting["tokens"], json.loads(line), limits["chars"])
            answer = json.dumps({"turns": turns})
        except MemoryError:
            answer = json.dumps({"error": f"it needs more than {limits['memory_bytes'] >> 20} MiB"})
        except Exception as error:  # a template can raise anything
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]})
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
