"""The console entry: runs a command, and answers every mistake with a message, a hint and an exit status."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

import typer

from isthmus.cli.shell.shell import Shell
from isthmus.core.errors import InputError, IsthmusError, UnavailableError

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as shells have it."""
PIPE_CLOSED = 141
"""Exit status when the reader of our output has gone: 128 + SIGPIPE."""

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a stream says that takes no more: a full disk behind `>`."""

_UsageError: type[Exception] = typer.BadParameter.__mro__[2]  # ClickException, wherever this Typer keeps it


def main(app: typer.Typer, arguments: Sequence[str] | None = None, *, shell: Shell | None = None) -> int:
    """Run one command of `app`; return its exit status: 0, or the `exit_code` of an `isthmus.core.errors`.

    The error goes to standard error with its hint, or, with `--json`, to standard output as one line of JSON.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    world = shell or Shell()
    try:
        command = typer.main.get_command(app)
        status = command.main(given, prog_name="isthmus", standalone_mode=False, obj=world)
        world.stdout.flush()
        return status if isinstance(status, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        _let_go_of_output(world)
        return PIPE_CLOSED
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        _let_go_of_output(world)
        lost = UnavailableError(f"cannot write: {error.strerror}", hint="free space where the output goes")
        return _fail(world, lost, as_json=False)
    except IsthmusError as error:
        return _fail(world, error, as_json="--json" in given)
    except _UsageError as error:
        return _fail(world, _usage(error), as_json="--json" in given)


def _usage(error: Exception) -> InputError:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "isthmus"
    message = error.format_message()  # type: ignore[attr-defined]
    return InputError(message, hint=f"see `{path} --help`")


def _fail(shell: Shell, error: IsthmusError, *, as_json: bool) -> int:
    if as_json:
        shell.line(error.as_dict())
    else:
        shell.note(f"error: {error.message}" + (f"\nhint:  {error.hint}" if error.hint else ""))
    return error.exit_code


def _let_go_of_output(shell: Shell) -> None:
    """Point standard output at nothing, so that the interpreter's last flush does not fail as well."""
    if shell.stdout is sys.stdout:
        with open(os.devnull, "wb") as nothing:  # noqa: PTH123
            os.dup2(nothing.fileno(), sys.stdout.fileno())
