"""The demo's folder: emptied by the next demo, never while a demo runs, and never a folder with other files."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.cli.demo.demo_folder import demo_folder, stock_sites
from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.files.user_files import load_job, load_pool


def test_a_demo_empties_what_the_one_before_left(tmp_path: Path) -> None:
    """A new pool, job and model are there, and nothing else."""
    for _ in range(2):
        with demo_folder(tmp_path / "demo") as folder:
            assert len(load_pool(folder / "pool.yaml").clusters) == 3
            assert Path(load_job(folder / "job.yaml").model).is_dir()
            assert not (folder / "result").exists()
            (folder / "result").mkdir()
            (folder / "report.html").touch()


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    """What a user keeps is never deleted; a file in the folder's place is named."""
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(InputError, match="not empty and not a demo folder"), demo_folder(tmp_path):
        pass
    with pytest.raises(UnavailableError, match="Not a directory"), demo_folder(tmp_path / "thesis.tex"):
        pass
    assert [one.name for one in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_demos_at_once_do_not_take_each_others_files(tmp_path: Path) -> None:
    """The second one gets an error, and the first one's files stay."""
    with demo_folder(tmp_path / "demo") as folder:
        with pytest.raises(UnavailableError, match="another demo uses"), demo_folder(folder):
            pass
        assert (folder / "job.yaml").exists()


def test_the_demos_sites_share_no_file(tmp_path: Path) -> None:
    """Each cluster has model and data of its own below its own folder, and the job names no path outside of it."""
    with demo_folder(tmp_path / "demo") as folder:
        job = stock_sites(folder / "sites", load_job(folder / "job.yaml"), load_pool(folder / "pool.yaml"))
    assert (job.model, job.checkpoints.folder, job.output) == ("/model", "/checkpoints", "/result")
    roots = sorted((tmp_path / "demo" / "sites").iterdir())
    assert len(roots) == 3
    files = [{one.relative_to(root) for one in root.rglob("*")} for root in roots]
    assert files[0] == files[1] == files[2]
    assert {Path("model/config.json"), Path("data/os.py")} <= files[0]
    assert len({(root / "data" / "os.py").stat().st_ino for root in roots}) == 3
