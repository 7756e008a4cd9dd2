"""The site's pages: cut at their headings, none lost, each link to where its target went, and the reference as the code has it."""

import re
import subprocess
import sys

import pytest
from pages import SMALL, WHOLE, Page, Section, Site, anchors_of, pieces_of
from reference import MADE_PAGES, cell, families
from support.command import commands

from repro.cli.list_command import entries_of
from repro.files import read_yaml
from repro.paths import REPO

CONFIG = REPO / "docs" / "site" / "mkdocs.yml"
SAID = "Much is said. " * (SMALL // 10)
LONG = "Words of a page.\n" * (WHOLE // 16)
PAGE = f"""# A page

It begins. {SAID}

## First
See [the third](#third) and [there](../README.md#start), not `[code](gone.md)`.
- one
  goes on
- two

```sh
## no heading
echo '[no](link.md)'
```

{SAID}

### Inside
{LONG}
## Second

Short.

## Third
A table:
| a |
|---|
| `b\\|c` |

{LONG}"""


@pytest.fixture
def small(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text(PAGE)
    (tmp_path / "README.md").write_text(
        "# Top\n\n## Start\n\n[data](data.csv), [the page](docs/page.md), [in](docs/page.md#inside).\n"
    )
    (tmp_path / "data.csv").write_text("a\n")
    return Site(tmp_path, [{"Home": "README.md"}, {"Rest": ["docs/page.md", "docs/page.md#second"]}])


def test_a_long_page_is_cut_and_its_links_follow(small):
    texts = small.linked()
    assert [*texts] == [
        "index.md",
        "page/index.md",
        "page/first.md",
        "page/inside.md",
        "page/third.md",
        "page/second.md",
    ]
    assert "[data](files/data.csv), [the page](page/index.md), [in](page/inside.md)." in texts["index.md"]
    assert "[the third](third.md) and [there](../index.md#start), not `[code](gone.md)`." in texts["page/first.md"]
    assert small.assets == {"data.csv"}
    assert small.nav_of_site() == [
        {"Home": "index.md"},
        {
            "Rest": [
                {
                    "A page": [
                        "page/index.md",
                        {"First": "page/first.md"},
                        {"Inside": "page/inside.md"},
                        {"Third": "page/third.md"},
                    ]
                },
                {"Second": "page/second.md"},
            ]
        },
    ]


def test_code_is_left_and_lists_and_tables_stand_apart(small):
    texts = small.linked()
    assert texts["page/first.md"].startswith("# First\nSee")
    assert "\n\n- one\n  goes on\n- two\n" in texts["page/first.md"]
    assert "```sh\n## no heading\necho '[no](link.md)'\n```" in texts["page/first.md"]
    assert texts["page/inside.md"].startswith("# Inside\n")
    assert "A table:\n\n| a |\n|---|\n| `b|c` |" in texts["page/third.md"]


def test_small_sections_stay_with_the_one_before(small):
    assert [[each.title for each in piece] for piece in pieces_of(PAGE)] == [
        ["A page"],
        ["First"],
        ["Inside", "Second"],
        ["Third"],
    ]
    page = Page("x", "x.md", pieces_of(PAGE)[2])
    assert anchors_of(page.text) == ["inside", "second"]
    assert "\n## Second\n" in page.text


@pytest.mark.parametrize(
    ("text", "nav", "says"),
    [
        ("[x](gone.md)", ["README.md"], "leads to no page"),
        ("[x](#gone)", ["README.md"], "leads to no page"),
        ("x", ["README.md#gone", "README.md"], "no section has the anchor 'gone'"),
        ("## A\n\nx", ["README.md#a"], "name the page too"),
    ],
)
def test_what_leads_nowhere_is_refused(text, nav, says, tmp_path):
    (tmp_path / "README.md").write_text(f"# Top\n\n{text}\n")
    with pytest.raises(ValueError, match=says):
        Site(tmp_path, nav).linked()


@pytest.fixture(scope="module")
def site():
    return Site(REPO, read_yaml(CONFIG)["nav"], MADE_PAGES)


def test_every_heading_of_the_repository_is_on_one_page(site):
    texts = site.linked()
    sources = {page.source for page in site.every if not page.source.startswith("@")}
    assert {str(path.relative_to(REPO)) for path in (REPO / "docs").glob("*.md")} <= sources
    for source in sources:
        own = [page for page in site.every if page.source == source]
        found = sorted(anchor for page in own for anchor in anchors_of(texts[page.site]))
        assert found == sorted(anchors_of((REPO / source).read_text(encoding="utf-8"))), source
        # The artifact guide is generated: its tables have no headings to be cut at.
        assert source == "ARTIFACT.md" or max(len(texts[page.site]) for page in own) < 1.2 * WHOLE, source
    assert len(texts) == len(site.every)


def test_the_reference_names_what_the_code_has(site):
    texts = {page.site: page.text for page in site.every if page.source.startswith("@")}
    for name, command in commands().items():
        text = texts[f"reference/commands/{name}.md"]
        assert [
            each.opts[0]
            for each in command.params
            if each.param_type_name == "option" and f"`{each.opts[0]}" not in text
        ] == []
    for name, (family, systems) in families().items():
        rows = re.findall(r"^\| `(\w+)`", texts[f"reference/knobs/{name}.md"], re.MULTILINE)
        assert {*rows} == {entry.name for system in systems for entry in entries_of(system)}
        metrics = texts[f"reference/metrics/{name}.md"]
        assert [
            each.name
            for each in family.every_metric
            if f"| `{each.name}` |" not in metrics or cell(each.formula) not in metrics
        ] == []
        columns = texts[f"reference/columns/{name}.md"]
        assert len(re.findall(r"^\| `", columns, re.MULTILINE)) == sum(map(len, family.columns.values()))
    assert cell("a|b <c> *d* `e` ``f_g``") == r"a\|b \<c\> \*d\* \`e\` `f_g`"


def test_the_site_is_built_and_asks_nobody(tmp_path):
    pytest.importorskip("material", reason="needs the extra docs: mkdocs-material is not installed")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--config-file",
        CONFIG,
        "--site-dir",
        tmp_path,
    ]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    loads = r"""<(?:script|img|iframe)[^>]* src="?(https?:[^" >]+)|<link[^>]* href="?(https?:[^" >]+)"""
    pages = [*tmp_path.rglob("*.html")]
    assert len(pages) > 100
    assert [path.name for path in pages if re.search(loads, path.read_text(encoding="utf-8"))] == []
    assert "var __index" in (tmp_path / "search" / "search_index.js").read_text(encoding="utf-8")[:20]


def test_a_page_of_its_own_has_its_title():
    page = Page("@x", "x.md", [Section(1, "`repro` this", "\ntext\n")])
    assert (page.title, page.text) == ("repro this", "# `repro` this\n\ntext\n")
    below = Page("x", "x.md", [Section(2, "A", "\n### B\n"), Section(2, "C", "\n### D\n")])
    assert re.findall(r"^#.*", below.text, re.MULTILINE) == ["# A", "## B", "## C", "### D"]
