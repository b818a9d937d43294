"""A hook of mkdocs (`hooks:` in mkdocs.yml): links from a page to files outside `docs` work in the built site, too.

A page links to a source file by its path relative to the page (`../src/isthmus/core/plan.py`), so the link works
when the repository is browsed. The hook copies each such file into the site as text, below `repository/`, and
points the link there. A link to a missing file is left as it is: `mkdocs build --strict` then fails.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

COPIES = "repository"
"""Folder of the site that holds the copied files."""

_LINK = re.compile(r"(?<=\]\()((?:\.\./)+[^)#\s]+)")


def on_files(files: Any, config: Any) -> Any:
    """Add a text copy of every linked repository file to the site's files."""
    root = Path(config.docs_dir).parent
    linked = {
        path
        for page in files.documentation_pages()
        for _, path in repository_links(page.content_string, page.src_uri, root)
    }
    for path in sorted(linked):
        text = (root / path).read_text(encoding="utf-8")
        files.append(File.generated(config, f"{COPIES}/{path}.txt", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001 - mkdocs' signature
    """Return the page with its links to repository files pointed at the copies."""
    targets = dict(repository_links(markdown, page.file.src_uri, Path(config.docs_dir).parent))
    to_top = "../" * (len(PurePosixPath(page.file.src_uri).parts) - 1)
    return _LINK.sub(
        lambda match: f"{to_top}{COPIES}/{targets[match[0]]}.txt" if match[0] in targets else match[0], markdown
    )


def repository_links(markdown: str, src_uri: str, root: Path) -> Iterator[tuple[str, str]]:
    """Yield (link as written, path from the repository's root) of each link to an existing file outside `docs`.

    `src_uri` is the page's path below `docs`, `root` the repository's folder.
    """
    for link in _LINK.findall(markdown):
        path = os.path.normpath(PurePosixPath("docs", src_uri).parent / link)
        if not path.startswith(("..", "docs/")) and (root / path).is_file():
            yield link, path
