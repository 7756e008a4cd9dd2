"""What a process asks of the machine."""

import ctypes
from typing import Any

import pytest

from engines.runtime import machine


def test_a_process_keeps_what_it_frees_where_the_c_library_can(monkeypatch):
    asked: list[tuple[int, int]] = []

    class Library:
        def __init__(self, most: int) -> None:
            self.mallopt = lambda name, size: asked.append((name, size)) or int(name == -1 or size <= most)

    def asks_of(most: int) -> bool:
        asked.clear()
        monkeypatch.setattr(ctypes, "CDLL", lambda name: Library(most))
        return machine.keep_freed_memory()

    assert asks_of(1 << 30)
    assert [name for name, _ in asked] == [-3, -1]
    # Older libraries keep blocks of 32 MiB at most; one that takes neither is asked for nothing more.
    assert asks_of(1 << 25)
    assert [name for name, _ in asked] == [-3, -3, -1]
    assert not asks_of(0)
    assert [name for name, _ in asked] == [-3, -3]


@pytest.mark.parametrize("error", [AttributeError, OSError, TypeError])
def test_another_c_library_is_left_as_it_is(monkeypatch, error):
    def refuse(name: Any) -> Any:
        raise error

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert not machine.keep_freed_memory()
