"""Rules of what is read: folders, files and globs, in one order, with a bound."""

from __future__ import annotations

import os

import fsspec
import pytest

from isthmus.core.errors import DataError
from isthmus.data.data_files import read_files


@pytest.fixture
def tree(tmp_path):
    """A folder with text on two levels, a hidden file, a hidden folder, and a binary file."""
    for name in ("b.txt", "a.py", "sub/c.md", ".hidden", ".git/config", "sub/.cache/x.txt"):
        file = tmp_path / "tree" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"content of {name}\n")
    (tmp_path / "tree" / "image.bin").write_bytes(b"\x89PNG\0\0")
    return tmp_path / "tree"


def names(found, tree):
    return [file.name.removeprefix(f"{tree}/") for file in found.files]


def test_folders_are_read_recursively_in_sorted_order(tree):
    """Visible text files of all levels come sorted by name; hidden and binary ones are counted."""
    found = read_files([str(tree)])
    assert names(found, tree) == ["a.py", "b.txt", "sub/c.md"]
    assert found.num_skipped == 4
    assert found.files[0].content == b"content of a.py\n"


def test_a_hidden_folder_above_the_data_does_not_hide_it(tree):
    """Only names below the given path count as hidden, and a file that is named itself is always read."""
    assert names(read_files([f"{tree}/.git"]), tree) == [".git/config"]
    assert names(read_files([f"{tree}/.git/*"]), tree) == [".git/config"]
    assert names(read_files([f"{tree}/.hidden"]), tree) == [".hidden"]


def test_globs_match_files(tree):
    """`*` stays in a folder, `**` goes down, and folders that match are no files."""
    assert names(read_files([f"{tree}/*"]), tree) == ["a.py", "b.txt"]
    assert names(read_files([f"{tree}/**/*.md"]), tree) == ["sub/c.md"]


def test_a_name_with_glob_signs_is_read_as_it_is(tmp_path):
    """A file whose name holds `[` or `*` is read, not taken as a pattern."""
    (tmp_path / "a[1]*.txt").write_text("content")
    assert len(read_files([str(tmp_path / "a[1]*.txt")]).files) == 1


def test_paths_keep_their_order_and_count_once(tree):
    """The paths' own order comes first; a file named by two paths is read once."""
    found = read_files([f"{tree}/sub", f"{tree}/b.txt", str(tree)])
    assert names(found, tree) == ["sub/c.md", "b.txt", "a.py"]


def test_any_file_system_of_fsspec_serves():
    """A URL is opened through its own file system."""
    memory = fsspec.filesystem("memory")
    memory.pipe("/isthmus-test/one.txt", b"in memory")
    try:
        assert read_files(["memory://isthmus-test"]).files[0].content == b"in memory"
    finally:
        memory.rm("/isthmus-test", recursive=True)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("absent", "no data at"),
        ("*.absent", "no file matches"),
        ("empty", "no data at"),
        ("blank", "contains no text"),
        ("binary", "contains no text .1 hidden or binary"),
        ("nosuchscheme://x", "cannot open data path"),
    ],
)
def test_paths_without_text_are_refused(tmp_path, path, message):
    """A path that is missing, empty, blank or all binary is an error that names it."""
    for folder in ("empty", "blank", "binary"):
        (tmp_path / folder).mkdir()
    (tmp_path / "blank" / "a.txt").write_text("")
    (tmp_path / "binary" / "a.bin").write_bytes(b"\0")
    given = path if "://" in path else str(tmp_path / path)
    with pytest.raises(DataError, match=message) as caught:
        read_files([given])
    assert given in caught.value.message


@pytest.mark.parametrize(("max_bytes", "expected"), [(10_000, 3), (33, 2), (32, 2), (16, 1), (1, 1)])
def test_max_bytes_bounds_what_is_read(tree, max_bytes, expected):
    """The first files in order are read up to the bound; the file that crosses it ends at a whole line."""
    found = read_files([str(tree)], max_bytes)
    assert len(found.files) == expected
    assert sum(len(file.content) for file in found.files) <= max_bytes


def test_the_bound_cuts_after_a_whole_line(tmp_path):
    """No half line is left by the bound, also in a file longer than the part that is probed."""
    (tmp_path / "a.txt").write_text("0123456789\n" * 2000)
    (file,) = read_files([str(tmp_path)], 15_000).files
    assert file.content == b"0123456789\n" * (15_000 // 11)


@pytest.mark.timeout(20)
def test_what_is_no_file_is_passed_over(tree):
    """Links to files are read; links to folders, to themselves or to nothing, and pipes, are skipped."""
    (tree / "sub" / "up").symlink_to("..")
    (tree / "self").symlink_to("self")
    (tree / "gone").symlink_to("nowhere")
    (tree / "also").symlink_to("a.py")
    os.mkfifo(tree / "pipe")
    found = read_files([str(tree)])
    assert names(found, tree) == ["a.py", "also", "b.txt", "sub/c.md"]
    assert found.num_skipped == 4 + 4
    assert names(read_files([f"{tree}/*"]), tree) == ["a.py", "also", "b.txt"]


def test_globs_and_nested_folders_of_a_url():
    """A URL is searched as a local path is: recursively, by pattern, hidden names passed over."""
    memory = fsspec.filesystem("memory")
    for name in ("a.jsonl", "sub/b.jsonl", "sub/.c.jsonl", "d.txt"):
        memory.pipe(f"/isthmus-globs/{name}", b"{}")
    try:
        everything = read_files(["memory://isthmus-globs"])
        assert [file.name for file in everything.files] == [
            "/isthmus-globs/a.jsonl", "/isthmus-globs/d.txt", "/isthmus-globs/sub/b.jsonl",
        ]  # fmt: skip
        assert everything.num_skipped == 1
        (file,) = read_files(["memory://isthmus-globs/*.jsonl"]).files
        assert file.name == "/isthmus-globs/a.jsonl"
        with pytest.raises(DataError, match="no file matches"):
            read_files(["memory://isthmus-globs/*.md"])
    finally:
        memory.rm("/isthmus-globs", recursive=True)
