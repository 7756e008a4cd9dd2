"""What a machine keeps of what it made."""

import os

import pytest

from engines import cache
from engines.cache import cache_folder, cached_result


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_same_inputs_are_made_once():
    made = []

    def make(inputs):
        return cached_result("kind", inputs, lambda: made.append(inputs) or b"-".join(inputs))

    for inputs in ([b"a", b"b"], [b"a", b"b"], [b"ab", b""], [b"b", b"a"], [b"a", b"b"]):
        assert make(inputs) == b"-".join(inputs)
    assert made == [[b"a", b"b"], [b"ab", b""], [b"b", b"a"]]


def test_one_kind_is_not_read_for_another():
    assert [cached_result(kind, [b"a"], kind.encode) for kind in ("one", "two")] == [b"one", b"two"]


def test_the_oldest_go(monkeypatch):
    monkeypatch.setattr(cache, "MOST_KEPT", 2)
    for place in range(4):
        cached_result("kind", [bytes([place])], lambda place=place: bytes([place]))
        for each in (cache_folder() / "kind").iterdir():
            os.utime(each, (each.read_bytes()[-1],) * 2)
    assert sorted(each.read_bytes()[-1] for each in (cache_folder() / "kind").iterdir()) == [2, 3]


def test_what_a_disk_lost_a_part_of_is_made_again():
    assert cached_result("kind", [b"a"], lambda: b"whole") == b"whole"
    (kept,) = (cache_folder() / "kind").iterdir()
    for content in (b"", kept.read_bytes()[:-1]):
        kept.write_bytes(content)
        assert cached_result("kind", [b"a"], lambda: b"again") == b"again"


def test_without_a_cache_all_is_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert [cached_result("kind", [b"a"], lambda made=made: made) for made in (b"1", b"2")] == [b"1", b"2"]
