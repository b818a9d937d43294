"""The Typer app with all commands."""

from __future__ import annotations

from isthmus.cli.app.root_command import make_app
from isthmus.cli.commands import (
    calibrate_commands,
    chip_commands,
    export_commands,
    file_commands,
    follow_commands,
    job_commands,
    plan_commands,
    pool_commands,
    queue_commands,
    report_commands,
    search_commands,
    server_commands,
    simulate_pool_commands,
)
from isthmus.cli.commands.accounting import ledger_commands, quota_commands, waits_command
from isthmus.cli.commands.catalogue import catalogue_commands
from isthmus.cli.commands.operations import audit_commands, login_command, notify_commands
from isthmus.cli.commands.processes import agent_command, links_command, serve_command, switch_command
from isthmus.cli.commands.rl import rl_commands
from isthmus.cli.commands.site import (
    duty_commands,
    join_commands,
    place_command,
    render_commands,
    site_commands,
    topology_command,
)
from isthmus.cli.commands.strategies import strategy_commands
from isthmus.cli.commands.wan import wan_commands
from isthmus.cli.demo import demo_command
from isthmus.cli.setup import doctor_command, init_command

app = make_app()
_COMMAND_MODULES = (
    demo_command,
    init_command,
    doctor_command,
    job_commands,
    queue_commands,
    follow_commands,
    report_commands,
    pool_commands,
    audit_commands,
    login_command,
    notify_commands,
    site_commands,
    duty_commands,
    topology_command,
    join_commands,
    catalogue_commands,
    ledger_commands,
    quota_commands,
    waits_command,
    search_commands,
    simulate_pool_commands,
    place_command,
    plan_commands,
    chip_commands,
    strategy_commands,
    calibrate_commands,
    export_commands,
    serve_command,
    agent_command,
    links_command,
    switch_command,
    wan_commands,
    rl_commands,
    render_commands,
    server_commands,
    file_commands,
)
for module in _COMMAND_MODULES:
    app.add_typer(module.commands)
