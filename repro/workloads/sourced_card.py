"""Cards in YAML on which every number has a role: where it is from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from engines.errors import UserError, require
from repro.files import one_line, read_yaml, unreadable_yaml

Role = Literal["stated", "inferred", "assumed", "by construction"]


@dataclass(frozen=True, kw_only=True)
class SourcedCard:
    name: str
    title: str
    summary: str
    homepage: str
    licence: str
    roles: Mapping[str, Role]
    """Of every number in the card's sections, by its field."""
    sources: tuple[str, ...]
    defects: tuple[str, ...]


Card = TypeVar("Card", bound=SourcedCard)


def known_cards(cards_dir: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in cards_dir.glob("*.yaml")))


def load_card(name: str, cards_dir: Path, parse: Callable[..., Card], *, unknown: str) -> Card:
    """The card in the file of this name; case does not matter. ``unknown`` says what is wrong where there is none."""
    names = known_cards(cards_dir)
    if name.lower() not in names:
        raise UserError(f"{unknown}: use one of {', '.join(names) or 'none: there are no cards'}")
    path = cards_dir / f"{name.lower()}.yaml"
    try:
        raw = read_yaml(path)
    except unreadable_yaml() as error:
        raise UserError(f"{path.name} is not YAML: {one_line(error)}: correct the file") from error
    card = parse(raw, where=path.name)
    require(card.name == path.stem, f"{path.name}: name={card.name!r} must be the file's own name, {path.stem!r}")
    return card


def parse_card(raw: object, kind: type[Card], sections: Mapping[str, type], file: type, *, where: str) -> Card:
    """``sections`` have the card's numbers; ``file`` is the kind of its local files."""
    top = _section(raw, kind, where)
    card = kind(
        **{
            **top,
            **{name: _build(part, top[name], f"{where}: {name}") for name, part in sections.items()},
            "local": tuple(_build(file, entry, f"{where}: local[{index}]") for index, entry in enumerate(top["local"])),
            "sources": tuple(top["sources"]),
            "defects": tuple(top["defects"]),
        }
    )
    numbers = {
        f"{name}.{field.name}"
        for name, part in sections.items()
        for field in fields(part)
        if getattr(getattr(card, name), field.name) is not None
    }
    if odd := sorted(card.roles.keys() ^ numbers):
        raise UserError(f"{where}: roles must name every number once; wrong or missing: {', '.join(odd)}")
    for key, role in card.roles.items():
        require(role in get_args(Role), f"{where}: roles {key}={role!r}: use one of {', '.join(get_args(Role))}")
    return card


def _build(kind: type, raw: object, where: str) -> Any:
    values = _section(raw, kind, where)
    try:
        return kind(**values)
    except (UserError, TypeError) as error:
        raise UserError(f"{where}: {error}") from error


def _section(raw: object, kind: type, where: str) -> dict[str, Any]:
    """A mapping with the fields of ``kind``: none unknown, none missing that has no default."""
    if not isinstance(raw, dict):
        raise UserError(f"{where} holds {type(raw).__name__}: it must be a mapping")
    names = [field.name for field in fields(kind)]
    needed = [field.name for field in fields(kind) if field.default is MISSING]
    unknown, missing = sorted(set(raw) - set(names)), [name for name in needed if name not in raw]
    if unknown or missing:
        raise UserError(f"{where} has unknown keys {unknown} and lacks {missing}: give {', '.join(names)}")
    return raw
