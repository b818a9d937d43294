"""The console entry point: runs a command and maps errors to messages, hints and exit statuses."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

import typer

from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.core.errors import InputError, IsthmusError, UnavailableError

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as in shells."""
PIPE_CLOSED = 141
"""Exit status when the reader of a pipe has closed it: 128 + SIGPIPE."""

_WRITE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errno values of a failed write to standard output, such as a full disk behind `>`."""

_UsageError: type[Exception] = typer.BadParameter.__mro__[2]  # ClickException, wherever Typer has it


def main(app: typer.Typer, arguments: Sequence[str] | None = None, *, env: CliEnvironment | None = None) -> int:
    """Run one command of `app`; return 0 or the `exit_code` of its error.

    The error and its hint go to standard error, or with `--json` to standard output as one line of JSON.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    environment = env or CliEnvironment()
    try:
        command = typer.main.get_command(app)
        status = command.main(given, prog_name="isthmus", standalone_mode=False, obj=environment)
        environment.stdout.flush()
        return status if isinstance(status, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output(environment)
        return PIPE_CLOSED
    except OSError as error:
        if error.filename is not None or error.errno not in _WRITE_ERRNOS:
            raise
        _discard_output(environment)
        failed = UnavailableError(f"cannot write: {error.strerror}", hint="free space on the disk of the output")
        return _report_error(environment, failed, as_json=False)
    except IsthmusError as error:
        return _report_error(environment, error, as_json="--json" in given)
    except _UsageError as error:
        return _report_error(environment, _usage_error(error), as_json="--json" in given)


def _usage_error(error: Exception) -> InputError:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "isthmus"
    message = error.format_message()  # type: ignore[attr-defined]
    return InputError(message, hint=f"see `{path} --help`")


def _report_error(env: CliEnvironment, error: IsthmusError, *, as_json: bool) -> int:
    if as_json:
        env.print_json(error.as_dict())
    else:
        indent = "\n" + " " * len("error: ")  # the message may hold lines from others: none looks like another error
        shown = f"error: {error.message.replace(chr(10), indent)}"
        env.print_note(shown + (f"\nhint:  {error.hint.replace(chr(10), indent)}" if error.hint else ""))
    return error.exit_code


def _discard_output(env: CliEnvironment) -> None:
    """Redirect standard output to the null device, so that the final flush cannot fail."""
    if env.stdout is sys.stdout:
        with open(os.devnull, "wb") as nothing:  # noqa: PTH123
            os.dup2(nothing.fileno(), sys.stdout.fileno())
