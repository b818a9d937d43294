"""Commands on the catalogue: `models` and `data`, each with list, show, add, grant and remove."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.command import command
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.client.api_client import ApiClient
from isthmus.client.file_manifest import folder_manifest, read_source, remote_manifest, upload_folder
from isthmus.client.find_entry import find_entry, find_version
from isthmus.core.catalogue import SHORT_VERSION_CHARS, EntryKind, FileManifest
from isthmus.core.errors import InputError
from isthmus.core.model import Model, load_model
from isthmus.core.views.catalogue_views import GrantChange, VersionAddition

PANEL = "Pool"
commands = typer.Typer()

EntryArgument = Annotated[
    str, typer.Argument(metavar="[OWNER/]NAME", help="An entry; without an owner your own, else the only one.")
]
VersionArgument = Annotated[str, typer.Argument(metavar="[OWNER/]NAME[@VERSION]", help="An entry, or a version of it.")]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The entry, which is made if it is new.")]
PlaceArgument = Annotated[
    str, typer.Argument(metavar="FOLDER|URL", help="The files: a folder of this machine, or a URL that sites can read.")
]
AtOption = Annotated[
    str | None, typer.Option("--at", metavar="URL", help="Where sites find the same files as in the folder.")
]
UploadOption = Annotated[
    str | None,
    typer.Option("--upload", metavar="URL", help="Copy the files to a folder below it once, for all sites to read."),
]
FileOption = Annotated[
    list[str] | None, typer.Option("--file", metavar="PATH", help="A file at the URL; repeat it for several.")
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="The config.json of a model that is only at a URL.")
]
UserArgument = Annotated[str, typer.Argument(metavar="USER", help="The name of another user.")]
RevokeOption = Annotated[bool, typer.Option("--revoke", help="Take the grant back.")]
AllOption = Annotated[bool, typer.Option("--all", help="Remove the entry with all its versions.")]


def _add_group(kind: EntryKind, word: str, things: str, example: str) -> None:
    """Add the commands of one kind of entries."""
    group = typer.Typer(help=f"{things.capitalize()} in the pool's catalogue.", no_args_is_help=False)
    commands.add_typer(group, name=word, rich_help_panel=PANEL)

    @command(group, panel=PANEL, name="list", examples=[f"isthmus {word} list", f"isthmus {word} list --json"])
    def show_entries(env: CliEnvironment, client: ApiClient) -> None:
        """List the entries that you own or were granted, with their newest version and the sites that have it."""
        found = client.entries(kind)

        def shown() -> object:
            from isthmus.cli.terminal.catalogue_tables import entries_table

            return entries_table(word, found, env.now())

        env.answer(found, shown)

    @command(group, panel=PANEL, name="show", examples=[f"isthmus {word} show {example}"])
    def show_entry(env: CliEnvironment, client: ApiClient, entry: EntryArgument) -> None:
        """Show an entry: its versions with their sources, the users with a grant, and how much of it each site has."""
        found, _ = find_entry(client.entries(kind), entry)

        def shown() -> object:
            from isthmus.cli.terminal.catalogue_tables import entry_page

            return entry_page(found, env.now())

        env.answer(found, shown)

    @command(
        group,
        panel=PANEL,
        name="add",
        examples=[
            f"isthmus {word} add {example} ./{example} --upload s3://lab-{word}/{example}",
            f"isthmus {word} add {example} ./{example} --at https://files.example.org/{example}",
            f"isthmus {word} add {example} s3://lab-{word}/{example}",
        ],
    )
    def add_version(
        env: CliEnvironment,
        client: ApiClient,
        name: NameArgument,
        place: PlaceArgument,
        at: AtOption = None,
        upload: UploadOption = None,
        file: FileOption = None,
        config: ConfigOption = None,
    ) -> None:
        """Add a version. Sites fetch its files by URL when a job needs them, and check each against its digest.

        The digests are taken from FOLDER, or by reading every file at the URL once. Hidden files are left out.
        """
        manifest, source, local = _read_files(env, place, at, upload, tuple(file or ()))
        model = _read_model(config or local) if kind == "model" else None
        found = client.add_version(VersionAddition(kind=kind, name=name, source=source, manifest=manifest, model=model))

        def shown() -> str:
            spec = f"catalogue:{found.name}@{manifest.version[:12]}"
            return f"{found.owner}/{found.name} has version {manifest.version}\nin a job: {spec}"

        env.answer(found, shown)

    @command(
        group,
        panel=PANEL,
        name="grant",
        examples=[f"isthmus {word} grant {example} bob", f"isthmus {word} grant {example} bob --revoke"],
    )
    def change_grant(
        env: CliEnvironment, client: ApiClient, entry: EntryArgument, user: UserArgument, revoke: RevokeOption = False
    ) -> None:
        """Let another user see and use an entry of yours, or take that back. Jobs submitted before keep it."""
        found, _ = find_entry(client.entries(kind), entry)
        after = client.change_grant(kind, found.owner, found.name, GrantChange(user=user, granted=not revoke))
        env.answer(after, lambda: f"{after.owner}/{after.name} is granted to {', '.join(after.grants) or 'no one'}")

    @command(
        group,
        panel=PANEL,
        name="remove",
        examples=[f"isthmus {word} remove {example}@3f9a01bc", f"isthmus {word} remove {example} --all"],
    )
    def remove_version(
        env: CliEnvironment, client: ApiClient, entry: VersionArgument, everything: AllOption = False
    ) -> None:
        """Remove a version of an entry of yours, or the entry. The sites drop their copies; the source stays."""
        found, version = find_entry(client.entries(kind), entry)
        if (version is None) != everything:
            raise InputError(
                f"{entry}: give a version, or --all for the entry", hint=f"isthmus {word} show {found.name} lists them"
            )
        removed = "every version" if version is None else find_version(found, version).version
        client.remove_version(kind, found.owner, found.name, version)
        answer = {"owner": found.owner, "name": found.name, "removed": removed}
        env.answer(answer, lambda: f"removed {removed} of {found.owner}/{found.name}")


def _read_files(
    env: CliEnvironment, place: str, at: str | None, upload: str | None, files: tuple[str, ...]
) -> tuple[FileManifest, str, Path | None]:
    """Return the manifest of the files, the URL where sites find them, and the folder if one was given."""

    def note(path: str) -> None:
        if env.stderr.isatty():
            env.print_note(f"reading {path}")

    if "://" in place:
        if at is not None or upload is not None:
            raise InputError(f"--at and --upload belong to a folder, not to {place}", hint="leave them out")
        source = read_source(place)
        return remote_manifest(source, files, note), source, None
    if (at is None) == (upload is None):
        raise InputError(
            f"{place} is a folder of this machine, which no site can read",
            hint="give --upload URL to copy it to a place that sites read, or --at URL if the same files are there",
        )
    if files:
        raise InputError("--file belongs to a URL", hint="leave it out: all visible files of the folder are read")
    folder, source = Path(place).expanduser(), read_source(at or upload or "")
    manifest = folder_manifest(folder, note)
    if upload is not None:  # a folder for each version, since sites may still fetch an older one
        source = f"{source}/{manifest.version[:SHORT_VERSION_CHARS]}"
        upload_folder(folder, manifest, source, note)
    return manifest, source, folder


def _read_model(place: Path | None) -> Model:
    """Return the dimensions of a model in a folder or `config.json`."""
    if place is None:
        raise InputError("a model at a URL needs its config.json", hint="give a copy of it: --config FILE")
    return load_model(place)


_add_group("model", "models", "models", "tiny-llama")
_add_group("data", "data", "data sets", "wiki")
