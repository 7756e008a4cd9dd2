"""What the pages name exists: paths, modules, links, commands with their options, make targets, stages."""

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.command import commands
from support.sources import tree
from support.tables import data_beside

import repro
from engines.data import KINDS
from repro.families.platforms import PLATFORMS
from repro.gpu_suite import suite as stages
from repro.paths import REPO
from repro.reports.figures import FIGURES
from repro.runs.system import SYSTEMS

WITH_PAGE = data_beside(__file__, "docs")["with_page"]
PAGES = sorted(
    [
        *(REPO / name for name in ("README.md", "CONTRIBUTING.md", "ARTIFACT.md", "CHANGELOG.md")),
        *(REPO / "docs").glob("*.md"),
        *(REPO / folder / "README.md" for folder in WITH_PAGE),
    ]
)
TOP = {path.name for path in REPO.iterdir() if path.is_dir() and not path.name.startswith(".")}
PACKAGES = ("engines", "baselines", "repro", "paper_figures")
SHORT_FOR = (REPO / "engines", REPO / "engines" / "dllm")
"""Folders that a page leaves out in front of a module's path."""
MADE_HERE = ("results/local", "results/figures")
"""Not in the repository."""

page_of = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(REPO)) for page in PAGES])


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def fenced(text: str) -> Iterator[str]:
    """Lines of code blocks, a continued one as one."""
    for block in re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        yield from re.sub(r"\\\n\s*", "", block).splitlines()


def quoted(text: str) -> list[str]:
    """What stands in backticks on a line or two; code blocks left out."""
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", prose)]


@page_of
def test_paths_exist(page):
    missing = []
    for word in quoted(text_of(page)):
        if not re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*/?", word) or word.startswith(MADE_HERE):
            continue
        first = word.partition("/")[0]
        if "/" in word and first in TOP:
            found = any(REPO.glob(word.rstrip("/")))
        elif "/" in word and "." not in word and any((root / first).is_dir() for root in SHORT_FOR):
            found = any((root / f"{word}.py").is_file() for root in SHORT_FOR)
        elif re.fullmatch(r"\w+\.py", word):
            found = any(any((REPO / folder).rglob(word)) for folder in (*PACKAGES, "tests"))
        else:
            continue
        if not found:
            missing.append(word)
    assert missing == []


@cache
def names_in(path: Path) -> frozenset[str]:
    """Names that a module defines or imports at its top level."""
    found: set[str] = set()
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update(alias.asname or alias.name for alias in node.names)
    return frozenset(found)


def resolves(dotted: str) -> bool:
    """A module, a package, or a name at the top level of one."""
    place = REPO.joinpath(*dotted.split("."))
    if place.is_dir() or place.with_suffix(".py").is_file():
        return True
    above, name = place.parent, place.name
    module = above / "__init__.py" if above.is_dir() else above.with_suffix(".py")
    return module.is_file() and (name in names_in(module) or (above == REPO / "repro" and name in repro.__all__))


@page_of
def test_modules_exist(page):
    named = re.findall(rf"(?<![\w./-])(?:{'|'.join(PACKAGES)})(?:\.\w+)+", " ".join(quoted(text_of(page))))
    entry_points = {f"repro.{kind}" for kind in (SYSTEMS.kind, PLATFORMS.kind, "gpu", "paper", *KINDS)}
    assert [name for name in named if name not in entry_points and not resolves(name)] == []


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@page_of
def test_links_lead_somewhere(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        if not place.exists() or (anchor and anchor not in anchors(place)):
            broken.append(target)
    assert broken == []


@cache
def options() -> dict[str, set[str]]:
    """Command -> its options."""
    return {
        name: {"--help"} | {opt for parameter in command.params for opt in (*parameter.opts, *parameter.secondary_opts)}
        for name, command in commands().items()
    }


def calls(text: str) -> Iterator[list[str]]:
    """Words behind ``repro`` of every call of the command line."""
    for line in (*fenced(text), *quoted(text)):
        if found := re.search(r"(?:^|[\s;/])(?:python3? -m )?repro (?=[a-z-])(.*)", line):
            yield shlex.split(found[1], comments=True)


@page_of
def test_commands_have_their_options(page):
    wrong = []
    for words in calls(text_of(page)):
        known = options().get(words[0])
        if known is None:
            wrong.append(words[0])
        else:
            wrong += [word for word in words[1:] if word.startswith("--") and word.partition("=")[0] not in known]
    assert wrong == []


@page_of
def test_options_by_themselves_are_some_command_s(page):
    every = set().union(*options().values())
    named = [word.split()[0] for word in quoted(text_of(page)) if word.startswith("--")]
    assert [name for name in named if name not in every] == []


def targets() -> set[str]:
    phony = re.search(r"^\.PHONY: (.+)$", (REPO / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert phony is not None
    own = {name for name in phony[1].split() if re.fullmatch(r"[\w-]+", name)}
    figures = (name.removeprefix("dllm-serve/").replace("/", "-") for name in FIGURES)
    return own | {f"reproduce-{name}" for name in figures}


@page_of
def test_make_targets_exist(page):
    text = text_of(page)
    named = [found[1] for line in (*fenced(text), *quoted(text)) if (found := re.match(r"make ([\w-]+)", line))]
    assert [name for name in named if name not in targets()] == []


def test_make_help_lists_every_target():
    """One figure stands for all."""
    listed = set(re.findall(r"'make ([\w-]+) ", (REPO / "Makefile").read_text(encoding="utf-8")))
    figures = {name for name in targets() if name.startswith("reproduce-") and name != "reproduce-all"}
    assert listed - figures == targets() - figures - {"help"}
    assert listed & figures


def test_using_lists_every_command():
    listed = re.findall(r"^\| `repro ([\w-]+)", text_of(REPO / "docs" / "using.md"), re.MULTILINE)
    assert sorted(listed) == sorted(options())


def test_stages_are_those_of_the_suite():
    text = text_of(REPO / "docs" / "gpu.md")
    rows = re.findall(r"^\| `([\w-]+)` \| .+ \| (\d+) \| [\d.]+ min \|$", text, re.MULTILINE)
    planned = [each.stage for each in stages.stages(stages.scale_of("h200"))]
    assert rows == [(stage, str(planned.count(stage))) for stage in dict.fromkeys(planned)]
    assert f"alone: {', '.join(f'`{stage}`' for stage in stages.FIRST)} |" in text


def test_the_page_of_results_names_the_processors_that_figures_name():
    figures = [path for path in (REPO / "results" / "cpu-tiny").iterdir() if path.suffix in (".txt", ".md")]
    named = {name for path in figures for name in re.findall(r"Xeon|EPYC", text_of(path))}
    # One section is of no figure: it has measurements beside another server, on a processor of their own.
    sections = re.split(r"^## ", text_of(REPO / "results" / "README.md"), flags=re.MULTILINE)
    beside = [each for each in sections if each.startswith("Beside vLLM's CPU build\n")]
    assert len(beside) == 1
    assert named == {name for each in sections if each not in beside for name in re.findall(r"Xeon|EPYC", each)}


def test_the_page_of_engines_names_every_folder_and_module():
    engines = REPO / "engines"
    named = set(re.findall(r"`(\w+)(?:\.py)?`", text_of(engines / "README.md")))
    here = {path.stem for path in engines.iterdir() if not path.stem.startswith(("__", "README"))}
    assert here - named == set()
