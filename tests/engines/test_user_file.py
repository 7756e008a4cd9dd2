"""Files that a user names: regular ones are read, anything else is one sentence at once."""

import os
import socket

import pytest

from engines.data import open_file, read_bytes, read_text
from engines.errors import UserError


def test_what_is_in_a_file_is_read_as_it_is(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"\xef\xbb\xbfline\r\nline")
    assert read_bytes("file", path) == b"\xef\xbb\xbfline\r\nline"
    assert read_text("file", path) == "line\nline"
    link = tmp_path / "link"
    link.symlink_to(path)
    with open_file("file", link) as file:
        assert file.read() == path.read_bytes()


def special(tmp_path, kind):
    path = tmp_path / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "null":
        return tmp_path / "a\0b"
    elif kind == "long":
        return tmp_path / ("x" * 5000)
    elif kind == "below a file":
        path.write_text("")
        return path / "inner"
    return "/dev/zero" if kind == "device" else path


@pytest.mark.parametrize(
    "kind", ["pipe", "socket", "folder", "loop", "null", "long", "below a file", "device", "absent"]
)
def test_what_is_no_file_is_refused_at_once(kind, tmp_path):
    path = special(tmp_path, kind)
    for read in (open_file, read_bytes, read_text):
        with pytest.raises(UserError, match="platform="):
            read("platform", path)


def test_what_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match=r"platform=.* bytes"):
        read_bytes("platform", path)


def test_text_of_another_encoding_is_refused(tmp_path):
    path = tmp_path / "latin"
    path.write_bytes("é".encode("latin-1"))
    with pytest.raises(UserError, match="UTF-8"):
        read_text("grid", path)
