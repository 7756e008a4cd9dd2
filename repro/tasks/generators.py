"""The tasks the embedded tiny model is trained on: their seeded problem generators, by name."""

from __future__ import annotations

from collections.abc import Callable

from repro.tasks import mini_code, mini_gsm
from repro.tasks.problem import Problem

GENERATORS: dict[str, Callable[..., list[Problem]]] = {
    mini_gsm.TASK: mini_gsm.generate,
    mini_code.TASK: mini_code.generate,
}
