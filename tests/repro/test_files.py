"""Files that are whole or absent, all of a set or none."""

import errno
import resource
from collections.abc import Iterator

import pytest

from repro.files import replace_all, replace_text, replacing


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file of this process grows beyond 8 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_set_of_files_is_written_whole(tmp_path):
    contents = {tmp_path / "a": b"1", tmp_path / "new" / "b": b"2"}
    replace_all(contents)
    assert {path: path.read_bytes() for path in contents} == contents


@pytest.mark.usefixtures("full_disk")
def test_of_a_set_that_does_not_fit_nothing_stays(tmp_path):
    with pytest.raises(OSError, match="large") as error:
        replace_all({tmp_path / "small": b"1", tmp_path / "large": b"123456789"})
    assert error.value.errno == errno.EFBIG
    assert error.value.filename == str(tmp_path / "large")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("full_disk")
def test_what_was_there_stays_where_the_new_does_not_fit(tmp_path):
    path = replace_text(tmp_path / "a", "before")
    with pytest.raises(OSError, match="File too large"):
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
