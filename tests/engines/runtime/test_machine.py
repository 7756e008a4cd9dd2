"""What a process asks of the machine."""

import ctypes
import gc
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


def test_the_collector_is_on_again_whoever_ends_first():
    def callers() -> tuple[Any, Any]:
        return machine.without_collection(), machine.without_collection()

    for is_nested in (True, False):
        first, second = callers()
        first.__enter__()
        second.__enter__()
        assert not gc.isenabled()
        for each in (second, first) if is_nested else (first, second):
            each.__exit__(None, None, None)
        assert gc.isenabled()


def test_the_collector_is_on_again_behind_an_error_and_in_every_call():
    @machine.without_collection()
    def fail() -> None:
        assert not gc.isenabled()
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            fail()
        assert gc.isenabled()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        with machine.without_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_is_on_where_another_thread_turns_it_on_meanwhile(monkeypatch):
    """The other ends between the look of this one and what it does then."""
    first, second = machine.without_collection(), machine.without_collection()
    first.__enter__()
    with monkeypatch.context() as patched:
        patched.setattr(gc, "isenabled", lambda: bool(first.__exit__(None, None, None)))
        second.__enter__()
    second.__exit__(None, None, None)
    assert gc.isenabled()
