"""Files that are whole or absent, all of a set or none."""

import errno
import os
import resource
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engines.errors import UserError
from repro.files import replace_all, replace_text, replacing, writable_file


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process grows beyond 8 bytes: not pytest's log either, so it ends with what is tested."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_set_of_files_is_written_whole(tmp_path):
    contents = {tmp_path / "a": b"1", tmp_path / "new" / "b": b"2"}
    replace_all(contents)
    assert {path: path.read_bytes() for path in contents} == contents


def test_of_a_set_that_does_not_fit_nothing_stays(tmp_path):
    with full_disk(), pytest.raises(OSError, match="large") as error:
        replace_all({tmp_path / "small": b"1", tmp_path / "large": b"123456789"})
    assert error.value.errno == errno.EFBIG
    assert error.value.filename == str(tmp_path / "large")
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_stays_where_the_new_does_not_fit(tmp_path):
    path = replace_text(tmp_path / "a", "before")
    with full_disk(), pytest.raises(OSError, match="File too large"):
        replace_text(path, "123456789")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_of_another_file_keeps_its_name(tmp_path):
    with pytest.raises(FileNotFoundError) as error, replacing(tmp_path / "a"):
        (tmp_path / "missing").read_bytes()
    assert error.value.filename == str(tmp_path / "missing")


def test_two_that_write_a_file_at_once_both_finish(tmp_path):
    """Threads have one process number, and so have containers that share a folder: the later stays, whole."""
    path = tmp_path / "a"
    with replacing(path) as later:
        with replacing(path) as earlier:
            later.write_text("later")
            earlier.write_text("earlier")
        assert path.read_text() == "earlier"
    assert [each.read_text() for each in tmp_path.iterdir()] == ["later"]


NO_PLACES: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
    "link to a device": lambda path: path.symlink_to("/dev/null"),
    "read-only": lambda path: path.touch(mode=0o444),
    "loop": lambda path: path.symlink_to("there"),
    "device": lambda path: None,
    "below a file": lambda path: Path("file").touch(),
}


@pytest.mark.parametrize("kind", NO_PLACES)
def test_what_is_no_plain_file_that_may_be_written_is_refused_and_stays(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)  # a socket's name is short
    path = Path({"device": "/dev/null", "below a file": "file/there"}.get(kind, "there"))
    NO_PLACES[kind](path)
    before = os.lstat(path) if os.path.lexists(path) else None
    with pytest.raises(UserError, match=str(path)):
        writable_file("out", path)
    with pytest.raises(UserError, match=str(path)):
        replace_text(path, "new")
    after = os.lstat(path) if os.path.lexists(path) else None
    assert before == after
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_links_are_followed_and_modes_are_kept(tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "a").write_text("old")
    (folder / "a").chmod(0o600)
    (tmp_path / "first").symlink_to("second")
    (tmp_path / "second").symlink_to("elsewhere/a")
    (tmp_path / "absent").symlink_to("elsewhere/b")
    replace_all({tmp_path / "first": b"new", tmp_path / "absent": b"made"})
    assert (tmp_path / "first").readlink() == Path("second")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"a": "new", "b": "made"}
    assert stat.S_IMODE((folder / "a").stat().st_mode) == 0o600


def test_a_file_that_is_printed_to_is_refused(tmp_path):
    """By its own name, as ``--out runs.csv > runs.csv``, and by its number."""
    with (tmp_path / "log").open("w") as log:
        kept = os.dup(1)
        os.dup2(log.fileno(), 1)
        try:
            for path in (tmp_path / "log", Path("/dev/stdout")):
                with pytest.raises(UserError, match="prints to"):
                    writable_file("out", path)
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def test_what_is_read_is_not_written_over(tmp_path):
    read = tmp_path / "requests.csv"
    read.touch()
    (tmp_path / "again.csv").hardlink_to(read)
    for path in (read, tmp_path / "again.csv"):
        with pytest.raises(UserError, match="requests"):
            writable_file("plot", path, tmp_path / "absent", read)
    assert writable_file("plot", tmp_path / "new.csv", read) == tmp_path / "new.csv"
