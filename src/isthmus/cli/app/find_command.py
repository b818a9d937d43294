"""`find_app`: the Typer app with the module of one command, so that a command loads what it needs and no more.

The whole command line takes 0.8 s of CPU to import, most of it the planner, the simulators and the coordinator.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import typer

from isthmus.cli.app.root_command import make_app

MODULES = {
    "isthmus.cli.commands.accounting.ledger_commands": ("bill", "ledger", "tariff"),
    "isthmus.cli.commands.accounting.quota_commands": ("quota",),
    "isthmus.cli.commands.accounting.waits_command": ("waits",),
    "isthmus.cli.commands.catalogue.catalogue_commands": ("data", "models"),
    "isthmus.cli.commands.chip_commands": ("chips",),
    "isthmus.cli.commands.file_commands": ("check", "schema"),
    "isthmus.cli.commands.follow_commands": ("logs", "watch"),
    "isthmus.cli.commands.job_commands": ("cancel", "choose", "delete", "jobs", "plans", "preempt", "submit"),
    "isthmus.cli.commands.operations.audit_commands": ("audit",),
    "isthmus.cli.commands.operations.login_command": ("login",),
    "isthmus.cli.commands.operations.notify_commands": ("notify",),
    "isthmus.cli.commands.pool_commands": ("pool", "token"),
    "isthmus.cli.commands.processes.agent_command": ("agent",),
    "isthmus.cli.commands.processes.links_command": ("links",),
    "isthmus.cli.commands.processes.serve_command": ("serve",),
    "isthmus.cli.commands.processes.switch_command": ("switch",),
    "isthmus.cli.commands.queue_commands": ("queue", "ranks", "show", "usage"),
    "isthmus.cli.commands.report_commands": ("report", "trace"),
    "isthmus.cli.commands.rl.rl_commands": ("rl",),
    "isthmus.cli.commands.server_commands": ("server",),
    "isthmus.cli.commands.site.render_commands": ("images", "render"),
    "isthmus.cli.commands.wan.wan_commands": ("gateway", "proxy", "wan"),
    "isthmus.cli.demo.demo_command": ("demo",),
    "isthmus.cli.setup.doctor_command": ("doctor",),
    "isthmus.cli.setup.init_command": ("init",),
}
"""Modules with the names of their commands. Any other word loads all commands, which are in `typer_app`."""


def find_app(arguments: Sequence[str]) -> typer.Typer:
    """Return the app with the command that `arguments` begin with, with all commands where none does."""
    word = arguments[0] if arguments else ""
    module = next((module for module, names in MODULES.items() if word in names), None)
    if module is None:
        app: typer.Typer = importlib.import_module("isthmus.cli.app.typer_app").app
        return app
    app = make_app()
    app.add_typer(importlib.import_module(module).commands)
    return app
