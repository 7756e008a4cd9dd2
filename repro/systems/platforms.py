"""Platforms: hardware, and what each family of systems runs on it by default."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from engines.cost.cards import Gpu, gpu
from engines.errors import UserError, require
from engines.named import load_named, where_of
from repro.registry import Registry

GB = 10**9
MIB = 2**20

P = TypeVar("P")


@dataclass(frozen=True, kw_only=True)
class Platform:
    name: str
    title: str
    executor: str
    """What runs a step where nothing else is asked for: torch (measured), roofline (simulated), or http (measured at the
    client)."""
    gpu: Any
    """The card's name in the catalogue, or one of a user's own, a ``Gpu``; None where only measuring is possible."""
    parts: tuple[Any, ...] = ()
    """Defaults of each family that runs on it."""
    digest: str = ""
    """A digest of what a file says of it, for the basis of its runs; what a module says is code."""

    @property
    def default_system(self) -> str:
        """What is run on it where nothing is named."""
        return next((part.system for part in self.parts if hasattr(part, "system")), "dllm-serve")

    def part(self, kind: type[P]) -> P:
        """The defaults of one family."""
        for part in self.parts:
            if isinstance(part, kind):
                return part
        able = [name for name in PLATFORMS if any(isinstance(part, kind) for part in PLATFORMS.get(name).parts)]
        raise UserError(
            f"platform={self.name!r} has no settings for this kind of system: use {', '.join(able) or 'a platform of your own'}"
        )

    def with_part(self, kind: type[Any], **changes: Any) -> Platform:
        """The platform with some of a family's defaults replaced."""
        parts = [replace(part, **changes) if isinstance(part, kind) else part for part in self.parts]
        return replace(self, parts=tuple(parts))


_DLLM = "repro.systems.dllm.platforms"
_BLOCK = "repro.systems.block.platforms"

PLATFORMS: Registry[Platform] = Registry(
    "platform",
    {
        "cpu-tiny": f"{_DLLM}:CPU_TINY",
        "rtx4090": f"{_DLLM}:RTX4090",
        "l40s": f"{_DLLM}:L40S",
        "a100": f"{_DLLM}:A100",
        "h100": f"{_DLLM}:H100",
        "h200": f"{_DLLM}:H200",
        "b200": f"{_DLLM}:B200",
        "h20x32": "repro.systems.ar.platforms:H20X32",
        "h200x32": "repro.systems.ar.platforms:H200X32",
        "h20-llada2-mini": f"{_BLOCK}:H20_LLADA2_MINI",
        "h200-llada2-mini": f"{_BLOCK}:H200_LLADA2_MINI",
        "h200-sdar-8b": f"{_BLOCK}:H200_SDAR_8B",
        "h100-sdar-8b": f"{_BLOCK}:H100_SDAR_8B",
        "endpoint": "repro.systems.http.platforms:ENDPOINT",
    },
)
"""A family's platforms are in a module of its own, so that runs of one do not rest on the platforms of another."""


CARD_FILE = re.compile(r"(?P<path>.+\.ya?ml)(:(?P<name>[^:/\\]+))?")
"""A card of a file as it is given, its path, or as cells name it, with the card's own name behind."""


def platform(name: str) -> Platform:
    """One of ``PLATFORMS``, the card of a YAML file, or any other: ``module:NAME`` then is its name, by which it is found
    again."""
    if isinstance(name, str) and (told := CARD_FILE.fullmatch(name)):
        # By name: runs of a family do not rest on what the file's other families have there.
        read = load_named("platform", "repro.systems.card_file:platform_of")
        own: Platform = read(told["path"], told["name"])
        return own
    found = PLATFORMS.get(name)
    require(isinstance(found, Platform), f"platform={name!r} is no repro.systems.platforms.Platform: name one")
    return found if name in PLATFORMS else replace(found, name=where_of("platform", name))


def card(name: str) -> Gpu:
    """A card of the catalogue, of a YAML file, or any other as ``module:NAME``."""
    where = platform(name).gpu if CARD_FILE.fullmatch(name) else name
    assert where is not None, "a file is of a card"
    return gpu(where)
