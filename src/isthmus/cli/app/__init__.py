"""The Typer application, its console entry point and its generated reference."""
