"""`SeededRuns`: runs by seeds whose results are kept in files, so that later and other processes go on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class SeededRuns:
    """The runs of one part in `folder`: a file for each seed, empty until its run has ended.

    A seed is taken by making its file, so several processes may share a folder. A run that was cut off keeps its empty
    file: its seed is not run again, and `num_open` counts it.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def take(self) -> int:
        """Return the first seed that no process has taken."""
        seed = 0
        while True:
            try:
                self._file(seed).touch(exist_ok=False)
            except FileExistsError:
                seed += 1
            else:
                return seed

    def note(self, seed: int, result: Mapping[str, Any]) -> None:
        """Keep the result of a run that has ended."""
        part = self.folder / f"{seed}.part"
        part.write_text(json.dumps(result))
        part.replace(self._file(seed))

    @property
    def results(self) -> list[dict[str, Any]]:
        """Return the results of all runs that have ended, by seed."""
        texts = {int(file.stem): file.read_text() for file in self.folder.glob("*.json")}
        return [json.loads(texts[seed]) for seed in sorted(texts) if texts[seed]]

    @property
    def num_open(self) -> int:
        """Return how many runs have begun and not ended: those of other processes now, and those that were cut off."""
        return sum(not file.stat().st_size for file in self.folder.glob("*.json"))

    def _file(self, seed: int) -> Path:
        return self.folder / f"{seed}.json"
