"""The site's pages out of the repository's: a long one is cut at its headings, and links lead where their targets went.

Nothing here knows MkDocs. A page is named by its path in the repository, a part of it by the anchor that GitHub gives its heading."""

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

WHOLE = 7000
"""Characters up to which a page stays whole."""
SMALL = 700
"""A section below it stays on the page of the one before it."""
MADE = "@"
"""In front of what is generated, in the place of a path."""
_FENCED = r"^ *```.*?^ *```[^\n]*$"
_CODE = rf"{_FENCED}|`[^`\n]+`"
_ITEM = r"(?:[-*]|\d+\.) "


class Section(NamedTuple):
    level: int
    title: str
    text: str
    """Without its heading."""

    @property
    def anchor(self) -> str:
        return slug(self.title)


@dataclass(frozen=True)
class Page:
    """One of the site: sections that stand together, the first of which gives it its title."""

    source: str
    """Path in the repository, or what made it."""
    site: str
    sections: Sequence[Section]

    @property
    def title(self) -> str:
        return self.sections[0].title.replace("`", "")

    @property
    def text(self) -> str:
        first, *others = self.sections
        # Headings of a section that has become a page rise with it.
        parts = [f"# {first.title}\n{_raised(first.text, first.level - 1)}"]
        parts += [
            f"{'#' * max(2, each.level - first.level + 1)} {each.title}\n{_raised(each.text, each.level - 2)}"
            for each in others
        ]
        return spaced("\n".join(parts))


def slug(title: str, _: str = "-") -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _raised(text: str, by: int) -> str:
    return outside_code(text, lambda part: re.sub(rf"^#{{{max(by, 0)}}}(?=#)", "", part, flags=re.MULTILINE))


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with what is no code changed."""
    parts = re.split(f"({_CODE})", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if place % 2 else change(part) for place, part in enumerate(parts))


def spaced(text: str) -> str:
    """With an empty line in front of lists and tables, and bars of code as they are, where Markdown and GitHub differ."""
    found: list[str] = []
    is_code = False
    for line in text.split("\n"):
        is_code ^= line.lstrip().startswith("```")
        before = found[-1] if found else ""
        is_list, is_table = (re.match(mark, line) is not None for mark in (_ITEM, r"\|"))
        if not is_code and before.strip() and ((is_list and not _is_in_list(found)) or (is_table and before[0] != "|")):
            found.append("")
        if is_table and not is_code:
            line = re.sub(r"`[^`]+`", lambda code: code[0].replace(r"\|", "|"), line)
        found.append(line)
    return "\n".join(found)


def _is_in_list(lines: Sequence[str]) -> bool:
    """Whether the paragraph that ends these lines begins as an item."""
    start = next((at + 1 for at in range(len(lines) - 1, -1, -1) if not lines[at].strip()), 0)
    return any(re.match(_ITEM, line) for line in lines[start:])


def sections_of(text: str, level: int = 2) -> list[Section]:
    """What is in front of the first heading of this level, under the page's title, and each section."""
    hidden = re.sub(_CODE, lambda code: re.sub(r"[^\n]", "x", code[0]), text, flags=re.DOTALL | re.MULTILINE)
    starts = [found.start() for found in re.finditer(rf"^#{{{level}}} ", hidden, re.MULTILINE)]
    if not starts or hidden[: starts[0]].strip():
        starts = [hidden.index("#"), *starts]
    found = []
    for start, end in zip(starts, (*starts[1:], len(text)), strict=True):
        heading, _, rest = text[start:end].partition("\n")
        marks, _, title = heading.partition(" ")
        found.append(Section(len(marks), title.strip(), rest))
    return found


def pieces_of(text: str, picked: Sequence[str] = ()) -> list[list[Section]]:
    """Sections that become a page each; ``picked`` are anchors of those that do so whatever their size."""
    if len(text) <= WHOLE and not picked:
        return [sections_of(text)]
    sections: list[Section] = []
    for each in sections_of(text):
        if len(each.text) > WHOLE:
            sections += sections_of(f"{'#' * each.level} {each.title}\n{each.text}", each.level + 1)
        else:
            sections.append(each)
    groups: list[list[Section]] = []
    for each in sections:
        apart = each.anchor in picked or not groups or groups[-1][0].anchor in picked
        # What stands in front of the first section is seldom a page.
        is_opening = len(groups) == 1 and len(groups[0]) == 1 and len(groups[0][0].text) < SMALL
        if not apart and (is_opening or len(each.text) < SMALL):
            groups[-1].append(each)
        else:
            groups.append([each])
    if missing := {*picked} - {each.anchor for each in sections}:
        raise ValueError(f"nav: no section has the anchor {min(missing)!r}: give one that is there")
    return groups


def stem_of(path: str) -> str:
    """Where a page's parts are: docs/using.md below using, results/README.md below results."""
    stem = path.removeprefix("docs/").removesuffix(".md").lower()
    return "" if stem == "readme" else stem.removesuffix("/readme")


@dataclass
class Site:
    """``nav`` is MkDocs's, whose leaves are paths in the repository, a path with the anchor of a section that is picked out of
    its page, or a name of ``made``, which gives pages by what stands behind ``@``."""

    root: Path
    nav: Sequence[Any]
    made: Mapping[str, Callable[[], Sequence[Page]]] = field(default_factory=dict)
    pages: dict[str, list[Page]] = field(init=False, default_factory=dict)
    """By leaf."""
    assets: set[str] = field(init=False, default_factory=set)
    """Paths of files that pages show or lead to."""

    def __post_init__(self) -> None:
        leaves = [*_leaves(self.nav)]
        for leaf in leaves:
            if leaf.startswith(MADE):
                self.pages[leaf] = [*self.made[leaf.removeprefix(MADE)]()]
        paths = dict.fromkeys(leaf.partition("#")[0] for leaf in leaves if not leaf.startswith(MADE))
        for path in paths:
            picked = [leaf.partition("#")[2] for leaf in leaves if leaf.startswith(f"{path}#")]
            self._take(path, picked)
            if path not in leaves and path in self.pages:
                raise ValueError(f"nav: of {path} there are sections alone: name the page too")

    def _take(self, path: str, picked: Sequence[str]) -> None:
        pieces = pieces_of((self.root / path).read_text(encoding="utf-8"), picked)
        stem = stem_of(path)
        for number, sections in enumerate(pieces):
            name = "index" if number == 0 else sections[0].anchor
            site = f"{stem or 'index'}.md" if len(pieces) == 1 else posixpath.join(stem, f"{name}.md")
            page = Page(path, site, sections)
            leaf = f"{path}#{sections[0].anchor}" if sections[0].anchor in picked else path
            self.pages.setdefault(leaf, []).append(page)

    @property
    def every(self) -> list[Page]:
        return [page for pages in self.pages.values() for page in pages]

    def places(self) -> dict[tuple[str, str], tuple[str, str]]:
        """(path, anchor) in the repository -> (page, anchor) of the site; a page's top has no anchor."""
        found: dict[tuple[str, str], tuple[str, str]] = {}
        for page in self.every:
            for anchor in anchors_of(page.text):
                found.setdefault((page.source, anchor), (page.site, anchor))
            found[page.source, page.sections[0].anchor] = (page.site, "")
            found.setdefault((page.source, ""), (page.site, ""))
        return found

    def linked(self) -> dict[str, str]:
        """Site path -> text, with links that lead somewhere on the site. Raises ValueError for one that leads nowhere."""
        places = self.places()

        def of(page: Page) -> str:
            return outside_code(page.text, lambda part: self._linked(part, page, places))

        return {page.site: of(page) for page in self.every}

    def _linked(self, text: str, page: Page, places: Mapping[tuple[str, str], tuple[str, str]]) -> str:
        def lead(found: re.Match[str]) -> str:
            target = found[1]
            if re.match(r"https?:|mailto:", target) or page.source.startswith(MADE):
                return found[0]
            path, _, anchor = target.partition("#")
            path = posixpath.normpath(posixpath.join(posixpath.dirname(page.source), path)) if path else page.source
            if (path, anchor) in places:
                site, anchor = places[path, anchor]
            elif (path, "") not in places and (self.root / path).is_file():
                self.assets.add(path)
                site, anchor = f"files/{path}", ""
            else:
                raise ValueError(
                    f"{page.source}: the link {target!r} leads to no page of the site: name it in mkdocs.yml"
                )
            near = posixpath.relpath(site, posixpath.dirname(page.site) or ".")
            return f"]({near}{anchor and '#' + anchor})"

        return re.sub(r"\]\(([^)\s]+)\)", lead, text)

    def nav_of_site(self) -> list[Any]:
        return [each for entry in self.nav for each in self._entries(entry)]

    def _entries(self, entry: Any) -> Iterator[Any]:
        if isinstance(entry, str):
            pages = self.pages[entry]
            first = pages[0]
            if len(pages) == 1:
                yield {first.title: first.site}
            else:
                yield {first.title: [first.site, *({page.title: page.site} for page in pages[1:])]}
            return
        ((title, value),) = entry.items()
        if isinstance(value, str):
            ((_, told),) = next(self._entries(value)).items()
            yield {title: told}
        else:
            yield {title: [each for item in value for each in self._entries(item)]}


def anchors_of(text: str) -> list[str]:
    prose = re.sub(_FENCED, "", text, flags=re.DOTALL | re.MULTILINE)
    return [slug(title) for title in re.findall(r"^#+ (.+)$", prose, re.MULTILINE)]


def _leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, Mapping):
        for value in nav.values():
            yield from _leaves(value)
    else:
        for each in nav:
            yield from _leaves(each)
