"""Every block of code in the documents runs as it stands there, at sizes of a test, or says here why it does not."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml
from support.command import Result, repro
from support.documents import Unit, calls_in, parsed, run_line, run_script, units

from repro.checks.documents import BLOCK
from repro.checks.documents import table as made_table
from repro.paths import REPO, RESULTS

pytestmark = pytest.mark.usefixtures("no_data")

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(REPO)) for path in (REPO / "docs").glob("*.md")),
    "datasets/README.md",
    "results/README.md",
]

CARD = "needs a GPU"
HUB = "takes a checkpoint of gigabytes from the hub"
PACKAGE = "installs packages"
RAY = "needs the extra ray: tests/repro/runs/test_pool.py has a stand-in for it"
EVAL = "needs the extra eval: tests/repro/test_lm_eval.py runs it where it is installed"
SILICON = "needs the extra silicon"
SERVERS = "needs vLLM, Dynamo or SGLang in an environment of its own: tests/repro/systems drives stand-ins"
LIVE = "some minutes of workers over a Redis: tests/repro/systems/live/test_live_system.py makes a small run"
MINUTES = "some minutes: 'make reproduce-all' runs it"
OUTLINE = "an outline of calls, no code"

NOT_RUN: Mapping[tuple[str, str], str] = {
    (
        "CONTRIBUTING.md",
        "[project.entry-points",
    ): "of a distribution's pyproject: tests/repro/systems/test_own_policies.py has one",
    (
        "README.md",
        "make reproduce-fig3",
    ): "some minutes, and sets up an environment: tests/properties/test_docs.py knows the target",
    ("README.md", "make test"): "runs this test, too",
    ("docs/ampd-live.md", "pip install"): PACKAGE,
    ("docs/ampd-live.md", "repro bench --system ampd-live"): LIVE,
    ("docs/ampd.md", "repro reproduce ampd/readings"): MINUTES,
    ("docs/architecture.md", "SYSTEMS.get(name)"): OUTLINE,
    ("docs/architecture.md", "paper_figures/dllm_serve/fig3.py"): OUTLINE,
    ("docs/block-diffusion.md", "repro reproduce block-diffusion"): "half a minute: tests/figures/test_block.py has it",
    ("docs/block-diffusion.md", "repro reproduce sglang"): "some forty seconds: tests/figures/test_block.py has it",
    ("docs/frontier-queues.md", "repro reproduce laps/queues"): MINUTES,
    ("docs/frontier-queues.md", "repro reproduce ampd/orders"): MINUTES,
    ("docs/gpu.md", "make gpu-"): CARD,
    ("docs/gpu.md", "mkdir -p results outbox"): CARD,
    ("docs/gpu.md", "[ ! -f outbox"): CARD,
    ("docs/gpu.md", "REPRO_COMMIT="): CARD,
    ("docs/gpu.md", "repro figure fig3"): f"draws what was measured: {CARD}",
    ("docs/gpu.md", "repro calibrate --platform h200"): f"reads what was measured: {CARD}",
    (
        "docs/laps.md",
        "repro bench --system laps --system sglang-pd --platform cpu-tiny",
    ): "measured: a short run on a busy machine is INVALID",
    ("docs/laps.md", "repro reproduce laps/"): MINUTES,
    ("docs/serving.md", "pip install"): PACKAGE,
    ("docs/serving.md", "repro serve --model GSAI-ML"): f"{HUB}, {CARD}",
    ("docs/serving.md", "repro serve --model Qwen"): f"{HUB}, {CARD}",
    ("docs/serving.md", "repro install"): PACKAGE,
    ("docs/serving.md", "lm_eval --model"): f"'make test-clients' runs it: {PACKAGE}",
    ("docs/serving.md", "repro bench --system vllm"): SERVERS,
    ("docs/serving.md", "repro bench --system dynamo"): SERVERS,
    ("docs/silicon.md", "repro calibrate --silicon"): SILICON,
    (
        "docs/simulation.md",
        "python -m repro.bench.prefill",
    ): "measured on a quiet core: tests/repro/bench/test_prefill.py has its parts",
    ("docs/silicon.md", "python -m repro.bench.silicon peer"): SILICON,
    ("docs/using.md", ".venv/bin/pip install"): PACKAGE,
    ("docs/using.md", "repro eval --model PATH"): CARD,
    ("docs/using.md", "repro reproduce fig3 --platform rtx4090 --pool ray"): RAY,
    ("docs/using.md", "repro reproduce ampd/fig4 "): "some six minutes: 'make reproduce-ampd-fig4' runs it",
    ("docs/using.md", "repro reproduce laps/fig6 "): "some minutes: 'make reproduce-laps-fig6' runs it",
    ("docs/using.md", ".venv/bin/repro generate --model"): f"{HUB}, {CARD}",
    ("docs/using.md", ".venv/bin/python -m repro.lm_eval.run run"): EVAL,
}
"""By document and how the line, or the block, begins. Calls of ``repro`` among them are parsed all the same."""

ELSEWHERE: Mapping[tuple[str, str], str] = {
    ("CONTRIBUTING.md", "repro "): "tests/properties/test_contributing.py",
    ("CONTRIBUTING.md", '"""'): "tests/properties/test_contributing.py",
    ("CONTRIBUTING.md", "platform: [rtx4090"): "tests/properties/test_contributing.py",
    **{
        ("docs/cards.md", first): "tests/properties/test_contributing.py"
        for first in (
            "name: l4",
            "query_rows,",
            '"""',
            "repro bench --platform mine/l4.yaml",
            "repro bench --platform mine.card",
            "repro plan-cluster",
            "repro ablate",
            "repro calibrate --platform mine/l4.yaml",
        )
    },
    ("CONTRIBUTING.md", "from mine.patient"): "tests/repro/testing/test_documented.py",
    ("CONTRIBUTING.md", "- id: shortest-helps"): "tests/properties/test_contributing.py",
    ("docs/using.md", "timestamp,ContextTokens"): "tests/repro/cli/test_workload.py",
    ("docs/using.md", "COLUMNS_OF_MINE="): "tests/repro/cli/test_workload.py",
    ("docs/using.md", "repro bench --workload"): "tests/repro/cli/test_workload.py",
    ("docs/cards.md", "name: this-cpu"): "tests/repro/systems/dllm/test_timed_run.py",
    ("docs/cards.md", "repro bench --num-prompts 32 --"): "tests/repro/systems/dllm/test_timed_run.py",
    ("docs/cards.md", "repro calibrate --platform mine/cpu.yaml"): "tests/repro/systems/dllm/test_timed_run.py",
    ("docs/cards.md", "repro bench --platform mine/cpu.yaml"): "tests/repro/systems/dllm/test_timed_run.py",
    ("docs/silicon.md", '{"package": "my-bench"'): "tests/repro/systems/test_card_file.py",
    ("docs/serving.md", "repro serve  "): "tests/repro/test_serving_docs.py",
    ("docs/serving.md", "curl "): "tests/repro/test_serving_docs.py",
    ("docs/serving.md", "from openai"): "tests/repro/test_serving_docs.py",
    ("docs/serving.md", "repro bench --url"): "tests/repro/test_serving_docs.py",
}
"""What another test runs as it stands in the document."""

FEWER: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("docs/ampd.md", "repro bench --system ampd"): {"--num-prompts": "24"},
    ("docs/ampd.md", "repro ablate --component routing"): {"--num-runs": "1", "--knob": "num_prompts=40"},
    ("docs/frontier-queues.md", "repro bench --system on-time"): {"--num-prompts": "200"},
    ("docs/laps.md", "repro bench --system laps --system sglang-pd --system reserve"): {"--num-prompts": "400"},
    ("docs/laps.md", "repro ablate --component awd"): {"--num-runs": "1"},
    ("docs/tuning.md", "repro bench --system laps"): {"--num-prompts": "200"},
    ("docs/dllm-serve.md", "import repro"): {"num_prompts=24": 'platform="rtx4090", num_prompts=2'},
    ("docs/silicon.md", "repro reproduce fig3"): {"--num-runs": "1", "--num-prompts": "2", "--request-rate": "0.5"},
    ("docs/using.md", "import repro"): {
        "num_prompts=100": "num_prompts=8",
        "seed=0)": 'seed=0, knobs=(("num_prompts", 8),))',
        '"rate": 0.5}': '"rate": 0.5, "knobs": {"num_prompts": 8}}',
    },
    ("docs/using.md", "repro bench --system ampd"): {"--num-prompts": "24"},
    ("docs/using.md", "repro eval --task mini-gsm --task mini-code"): {"--limit": "1"},
    ("docs/using.md", "repro ablate --component routing"): {"--num-runs": "1", "--knob": "num_prompts=40"},
    ("docs/using.md", "repro ablate --component awd"): {"--num-runs": "1"},
    ("docs/using.md", "repro capacity --workload dureader"): {"--num-prompts": "60"},
    ("docs/using.md", "repro capacity --workload lmsys"): {"--num-prompts": "100", "--gpus": "1..4"},
    ("docs/using.md", "repro capacity --workload mine.jsonl"): {"--num-prompts": "40"},
}
"""Sizes of a test. What is not named here is run as it stands."""


ENDS_WITH_1 = {
    (
        "docs/laps.md",
        "repro bench --system laps --platform h200",
    ): "as printed nothing is dispatched again, and the run is INVALID"
}


def of(unit: Unit, table: Mapping[tuple[str, str], object]) -> list[tuple[str, str]]:
    return [key for key in table if key[0] == unit.page and unit.first.startswith(key[1])]


def is_run(unit: Unit) -> bool:
    return not of(unit, NOT_RUN) and not of(unit, ELSEWHERE)


def write_grid(text: str, folder: Path) -> None:
    (folder / "grid.yaml").write_text(text.replace("num_prompts: 16", "num_prompts: 4"))


def draw_requests(text: str, folder: Path) -> None:
    (folder / "requests.jsonl").write_text(text)
    asked = (
        "--platform",
        "rtx4090",
        "--dataset-path",
        folder / "requests.jsonl",
        "--arrivals",
        "trace",
        "--num-prompts",
        2,
    )
    result = repro("bench", *asked, "--result-dir", folder / "runs")
    assert (result.code, "INVALID" in result.out) == (0, False), result


def declare(text: str, folder: Path) -> None:
    """A table of a document."""
    ((_, declared),) = yaml.safe_load(text).items()
    assert re.search(r"^\| Sparse-dLLM \| \d+ \| [\d.]+ \[", made_table(declared, RESULTS), re.MULTILINE)


def mark(text: str, folder: Path) -> None:
    """The place of a table."""
    assert re.fullmatch(BLOCK, text.strip())


def name_folders(text: str, folder: Path) -> None:
    named = re.findall(r"^([\w/]+/) ", text, re.MULTILINE) + re.findall(r"^(tests/)$", text, re.MULTILINE)
    assert len(named) == len(re.findall(r"^\S", text, re.MULTILINE))
    assert [name for name in named if not (REPO / name).is_dir()] == []


USED: Mapping[tuple[str, str], Callable[[str, Path], None]] = {
    ("README.md", "engines/"): name_folders,
    ("CONTRIBUTING.md", "<!-- generated: burst"): mark,
    ("CONTRIBUTING.md", "burst:"): declare,
    ("docs/using.md", "system: [dllm-serve, sparse-dllm]"): write_grid,
    ("datasets/README.md", '{"arrival_s": 0.0'): draw_requests,
}
"""What is no program: it is put to its use."""


@pytest.mark.parametrize("page", [page for page in PAGES if any(map(is_run, units(page)))])
def test_blocks_run(page, tmp_path, monkeypatch):
    """One after the other, in one folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").symlink_to(REPO / "tests")
    rounds = re.findall(r"`(\[\[.*?\]\])`", (REPO / page).read_text(encoding="utf-8"))
    (tmp_path / "mine.jsonl").write_text("".join(f'{{"rounds": {each}}}\n' for each in rounds * 40))
    for unit in filter(is_run, units(page)):
        if used := of(unit, USED):
            USED[used[0]](unit.text, tmp_path)
        else:
            result = ran(unit, tmp_path)
            # A comparison ends with 1 where something has changed.
            may_be_1 = unit.text.startswith("repro compare") and not result.err
            codes = (1,) if of(unit, ENDS_WITH_1) else (0, 1) if may_be_1 else (0,)
            assert result.code in codes, (unit.text, result)


def ran(unit: Unit, folder: Path) -> Result:
    assert unit.kind in ("sh", "python"), f"{unit.page}: nothing here runs {unit.kind!r}: {unit.first}"
    sizes = {name: value for key in of(unit, FEWER) for name, value in FEWER[key].items()}
    if unit.kind == "sh":
        return run_line(unit.text, folder, sizes)
    text = unit.text
    for name, value in sizes.items():
        assert name in text
        text = text.replace(name, value)
    return run_script(text, folder)


@pytest.mark.parametrize("page", PAGES)
def test_calls_are_read_as_they_stand(page):
    """Also of what is not run: commands, options, words to choose from, systems, platforms and figures are there."""
    for unit in units(page):
        for name, *words in calls_in(unit.text) if unit.kind == "sh" else ():
            if not any(word.startswith(("mine.", "mine/")) for word in words):
                parsed(name, words)


def test_every_reason_is_of_a_block_and_every_block_has_one():
    every = [unit for page in PAGES for unit in units(page)]
    for table in (NOT_RUN, ELSEWHERE, FEWER, USED, ENDS_WITH_1):
        found = {key for unit in every for key in of(unit, table)}
        assert [key for key in table if key not in found] == []
    for unit in every:
        assert len(of(unit, NOT_RUN) + of(unit, ELSEWHERE)) <= 1, unit
    assert [path for path in ELSEWHERE.values() if not (REPO / path).is_file()] == []


def test_no_block_is_missed():
    """None is without a fence: what is only indented is found by nobody."""
    for page in PAGES:
        text, block = (
            (REPO / page).read_text(encoding="utf-8"),
            re.compile(r"^ *```\w*\n.*?^ *```$", re.DOTALL | re.MULTILINE),
        )
        assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(block.findall(text)), page
        assert re.findall(r"\n\n {4}.*", block.sub("", text)) == [], page
