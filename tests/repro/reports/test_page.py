"""The page of figures and claims: what it holds, and how a browser finds it, where one is installed."""

import importlib.util
import re
import shutil
from pathlib import Path

import pytest
from support.command import refused, repro

from repro.paths import RESULTS
from repro.reports.page import contents, html, interval_of, rows_of
from repro.reports.run_table import SUFFIX, read_table, with_head

FIGURES = ("h20x32/fig7-h20x32", "h20x32/table1-h20x32", "laps-h200/boundary-h200")
CHROMIUM = shutil.which("chromium")
HAS_BROWSER = CHROMIUM is not None and importlib.util.find_spec("playwright") is not None


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    for figure in FIGURES:
        for path in (RESULTS / figure).parent.glob(f"{Path(figure).name}.*"):
            (root / figure).parent.mkdir(exist_ok=True)
            shutil.copy(path, (root / figure).parent)
    for path in RESULTS.glob("claims-*.csv"):
        shutil.copy(path, root)
    shutil.copytree(RESULTS / "truth", root / "truth")
    return root


@pytest.fixture(scope="module")
def page(results: Path) -> str:
    return html(contents(results))


def test_a_page_needs_nothing_else(page):
    assert re.findall(r'(?:src|href)="(?!data:image/webp;base64,|#)[^"]*"', page) == []
    assert "default-src 'none'" in page
    assert page.count("data:image/webp") == 1
    assert len(re.findall(r'<tr class="claim"', page)) == 289


def test_a_claim_stands_beside_its_figure(results):
    by_name = {section.name: section for _, found in contents(results)["papers"] for section in found}
    assert len(by_name["ampd/fig7"].claims) == 9
    assert {row["obtained"] for row in by_name["ampd/fig7"].claims} == {"measured", ""}
    (picture,) = by_name["ampd/fig7"].pictures
    assert (picture.labels, picture.provenance["runs"]) == (("measured",), "18")
    assert picture.provenance["command"].startswith("repro reproduce ampd/fig7 --platform h20x32")
    (table,) = by_name["ampd/table1"].pictures
    assert (table.image, table.labels) == ("", ("computed",))
    assert len(table.rows) > 2


def test_runs_of_several_versions_are_told(results, tmp_path):
    changed = tmp_path / "h20x32"
    shutil.copytree(results / "h20x32", changed)
    path = changed / f"fig7-h20x32{SUFFIX}"
    table = read_table(path)
    rows = path.read_text().partition("\n")[2]
    head = {name: value for name, value in table.head.items() if name != "seal"}
    path.write_text(with_head(head, rows.replace(",measured,true,", ',"measured, other code",true,', 3)))
    found = contents(tmp_path)["papers"][0][1]
    warnings = next(section for section in found if section.name == "ampd/fig7").pictures[0].warnings
    assert warnings == ("3 of 18 runs were made by another version of the code",)


@pytest.mark.parametrize(
    ("ours", "how", "interval"),
    [
        ("38.642", "38.6 [34.8, 42.6] % at best; with 64 clients 22.1 [19.9, 24.4] %", "[34.8, 42.6]"),
        ("19.46", "LAPS minus SGLang PD: -19 ± 5 points (-60 [-65, -55] %)", "± 5"),
        ("0.7", "1.9 [1.6, 2.2] at best", "–"),
        ("1 2", "1 [0, 2]", "–"),
    ],
)
def test_the_interval_is_that_of_the_value(ours, how, interval):
    assert interval_of({"ours": ours, "how": how}) == interval


def test_a_table_of_markdown_is_cells_and_words():
    assert rows_of("# Title\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nnote") == (
        [["a", "b"], ["1", "2"]],
        "Title\n\n\nnote",
    )


def test_a_folder_without_figures_is_refused(tmp_path):
    ran = repro("report", "--results", tmp_path, "--out", tmp_path / "page.html")
    assert "holds no table of runs" in refused(ran)


@pytest.mark.skipif(not HAS_BROWSER, reason="needs Chromium and the Python package playwright")
def test_filters_by_keyboard_in_a_browser(results, tmp_path):
    from playwright.sync_api import sync_playwright

    out = tmp_path / "page.html"
    repro("report", "--results", results, "--out", out)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width in (390, 1440):
            tab = browser.new_page(viewport={"width": width, "height": 900})
            said, asked = [], []
            tab.on("console", lambda message, said=said: said.append(message.text))
            tab.on("pageerror", lambda error, said=said: said.append(str(error)))
            tab.on("request", lambda request, asked=asked: asked.append(request.url))
            tab.goto(out.as_uri())
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
            shown = "document.querySelectorAll('tr.claim').values().filter(each => each.checkVisibility()).toArray()"
            assert tab.evaluate(f"{shown}.length") == 289
            tab.focus("#paper")
            tab.keyboard.press("ArrowDown")
            tab.keyboard.press("ArrowDown")
            tab.keyboard.press("Tab")
            tab.keyboard.type("reproduced")
            assert set(tab.evaluate(f"{shown}.map(each => each.dataset.verdict)")) == {"reproduced"}
            assert tab.inner_text("#count") == "7 claims, 0 figures and tables shown"
            tab.keyboard.press("Tab")
            tab.keyboard.press("Tab")
            tab.keyboard.press("Enter")
            tab.wait_for_function("document.getElementById('count').value.startsWith('289')")
            assert said == []
            assert {url for url in asked if not url.startswith("data:")} == {out.as_uri()}
        browser.close()
