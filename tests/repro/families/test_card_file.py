"""A card in a YAML file is a platform of every family."""

import gzip
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cells import a_cell
from support.command import refused, repro
from support.own_cards import CARD, PLANTED, write_card
from support.refusals import refuses
from support.tables import data_beside

from engines.cost.kernels import FOLDER, Card
from engines.cost.roofline import L40S, Calibration, Gpu, Roofline, StepWork, gpu
from engines.errors import UserError
from engines.models.shape import LLADA_8B
from repro import api
from repro.families.cost import load_calibration, save_calibration
from repro.families.platforms import DllmPart, Platform, platform
from repro.files import forget
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.runs.record import RunRecord

FAMILIES = {
    "dllm-serve": ("livebench", 0.1, {"num_prompts": 6}),
    "ampd": ("toolbench", 0.3, {"num_prompts": 6, "transient": True}),
    "laps": ("lmsys-chat-1m", 4.0, {"num_prompts": 60, "transient": True}),
}
REFUSED = data_beside(__file__, "cards")
AS_L40S = CARD.replace("121", "362.05").replace("300", "864").replace("24", "48")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    yield tmp_path
    sys.modules.pop("pythons", None)


def module(folder: Path, *lines: str) -> None:
    """``pythons``, which begins with the platform of the file."""
    own = (
        "from dataclasses import replace",
        "from repro.families.platforms import platform",
        "HERE = platform('mine.yaml')",
    )
    (folder / "pythons.py").write_text("\n".join((*own, *lines)))


def cell(system: str, where: str = "mine.yaml", **knobs: object) -> Cell:
    dataset, rate, own = FAMILIES[system]
    return a_cell(system, dataset, platform(where).name, "roofline", rate=rate, **{**own, **knobs})


def record(asked: Cell) -> RunRecord:
    return prepare(asked).run()


def times(asked: Cell) -> list[float]:
    return record(asked).tables["requests"]["finished_s"]


def card_of(where: str = "mine.yaml") -> Card:
    found = platform(where).gpu
    assert isinstance(found, Card)
    return found


# ---- what it is ---------------------------------------------------------------------------------


@pytest.mark.parametrize("system", FAMILIES)
def test_six_lines_run_every_family(system, own_folder):
    write_card(own_folder)
    assert len(CARD.splitlines()) == 6
    dataset, rate, knobs = FAMILIES[system]
    run = api.run(system, dataset, platform="mine.yaml", rate=rate, result_dir="runs", **knobs)
    assert run.validity.valid
    assert run.obtained == "simulated, uncalibrated"
    assert run.manifest["facts"]["calibration"].startswith("l4, uncalibrated")
    assert run.file.name.startswith(f"{system}_{dataset}_l4_roofline_r{rate:g}_s0_")
    again = api.run(system, dataset, platform="mine.yaml", rate=rate, result_dir="runs", **knobs)
    assert (again.cell, again.provenance) == (run.cell, run.provenance)
    assert len(run.table("requests")["status"]) == run.num_requests  # made again, from the cell alone


def test_the_planner_takes_it_too(own_folder):
    write_card(own_folder)
    done = repro("plan-cluster --model Qwen3-32B --trace toolbench --gpus 16 --hardware mine.yaml --top 1")
    assert done.code == 0, done.err
    assert "16 x l4" in done.out


def test_its_numbers_are_those_of_a_python_platform_of_the_same_card(own_folder):
    write_card(own_folder)
    module(
        own_folder,
        "from engines.cost.roofline import GB, Gpu",
        "L4 = Gpu(name='l4', bf16_tflops=121, memory_bandwidth_gb_s=300, memory_bytes=24 * GB, nvlink_gb_s=None, pcie_gb_s=64, source='')",
        "parts = [replace(part, gpu='pythons:L4') if hasattr(part, 'gpu') else part for part in HERE.parts]",
        "ON_NAME = replace(HERE, name='l4', gpu='pythons:L4', parts=tuple(parts), digest='')",
        "ON_OBJECT = replace(HERE, name='l4', gpu=L4, digest='')",
    )
    for system in FAMILIES:
        ours = times(cell(system))
        assert times(cell(system, "pythons:ON_NAME")) == ours
        assert times(cell(system, "pythons:ON_OBJECT")) == ours


def test_the_l40s_datasheet_under_another_name_gives_the_l40s_steps(own_folder):
    write_card(own_folder, AS_L40S)
    ours, theirs = Roofline(LLADA_8B, card_of()), Roofline(LLADA_8B, L40S)
    works = [StepWork(64, 64 * 512, 64, 512, 64, 2), StepWork(8192, 8192 * 512, 512, 8192, 8192, 16)]
    for work in works:
        assert ours.step_time(work) == theirs.step_time(work)
    part, known = platform("mine.yaml").part(DllmPart), platform("l40s").part(DllmPart)
    assert part.rates == known.rates
    for name in ("max_num_batched_tokens", "max_model_len", "memory_bytes"):
        assert getattr(part, name) == getattr(known, name)


@pytest.mark.parametrize(
    ("memory_gb", "tokens", "laps", "ampd"),
    data_beside(__file__, "card_file")["what_is_left_out_follows_from_the_memory"],
)
def test_what_is_left_out_follows_from_the_memory(own_folder, memory_gb, tokens, laps, ampd):
    write_card(own_folder, CARD.replace("memory_gb: 24", f"memory_gb: {memory_gb}"))
    where = platform("mine.yaml")
    dllm, clusters, prefill = where.parts
    assert (dllm.max_num_batched_tokens, prefill.model, clusters.model) == (tokens, laps, ampd)
    assert where.default_system == "dllm-serve"


def test_a_section_sets_a_familys_defaults(own_folder):
    text = "\ndllm:\n  max_num_seqs: 3\n  num_prompts: 9\nlaps: {model: Qwen2.5-7B, clients: 2, slo_ttft_s: 1}\nampd: {constants: trial-r2}"
    write_card(own_folder, CARD + text + "\nnum_gpus: 8\n")
    dllm, clusters, prefill = platform("mine.yaml").parts
    assert (dllm.max_num_seqs, dllm.num_requests["osc"]) == (3, 9)
    assert (prefill.clients, prefill.slo_s, prefill.most_instances) == (2, 1.0, 8)
    assert (clusters.constants, clusters.num_gpus) == ("trial-r2", 8)
    asked = cell("dllm-serve").without("num_prompts")
    assert len(prepare(asked).workload.requests) == 9


# ---- what a run is made of ----------------------------------------------------------------------


@pytest.mark.parametrize("system", FAMILIES)
def test_an_edit_makes_another_run_and_a_comment_does_not(system, own_folder):
    write_card(own_folder)
    first = prepare(cell(system)).cell.key
    forget()
    write_card(own_folder, CARD.replace(": 121", ": 121.0  # dense"))
    assert prepare(cell(system)).cell.key == first
    keys = {first}
    edits = [CARD.replace(*edit) for edit in (("121", "122"), ("300", "301"), (": 24", ": 25"), ("datasheet", "page"))]
    for text in (*edits, CARD + "laps: {clients: 3}\n"):
        forget()
        write_card(own_folder, text)
        keys.add(prepare(cell(system)).cell.key)
    write_card(own_folder, calibration="fit.json")
    for overhead in (1e-3, 2e-3):
        forget()
        write_fit(own_folder, step_overhead_s=overhead)
        keys.add(prepare(cell(system)).cell.key)
    assert len(keys) == 8


def test_another_card_in_the_file_is_not_taken_for_the_one_that_a_run_names(own_folder):
    write_card(own_folder)
    asked = cell("dllm-serve")
    assert asked.platform == "mine.yaml:l4"
    forget()
    write_card(own_folder, CARD.replace("l4", "l5", 1))
    with pytest.raises(UserError, match=r"platform='mine\.yaml:l4': the card in this file is 'l5' now"):
        prepare(asked)


# ---- calibrations and kernels -------------------------------------------------------------------


def write_fit(folder: Path, card: str = "l4", **changes: float) -> None:
    constants = {**PLANTED, **changes}
    fitted = Calibration(gpu=card, fitted_on=("12 steps of m.csv",), note="three constants", **constants)
    save_calibration(fitted, folder / "fit.json")


@pytest.mark.parametrize("system", FAMILIES)
def test_a_calibration_is_what_every_family_is_charged_by(system, own_folder):
    write_card(own_folder)
    peaks = times(cell(system))
    write_fit(own_folder)
    write_card(own_folder, name="fitted.yaml", calibration="fit.json")
    done = record(cell(system, "fitted.yaml"))
    assert done.manifest["calibration"].startswith("l4, fitted on 12 steps of m.csv")
    assert "uncalibrated" not in done.manifest["calibration"]
    assert done.tables["requests"]["finished_s"] != peaks
    settings = prepare(cell(system, "fitted.yaml")).deployment.settings
    constants = {"ampd": lambda: settings.ground.hardware.constants, "laps": lambda: settings.knobs.constants}.get(
        system
    )
    if constants is not None:
        assert {name: getattr(constants(), name) for name in PLANTED} == PLANTED


def test_a_reading_of_the_cost_model_keeps_its_own_constants(own_folder):
    write_fit(own_folder)
    write_card(own_folder, calibration="fit.json")
    settings = prepare(cell("ampd", constants="trial-r2")).deployment.settings
    assert settings.ground.hardware.constants.name == "trial-r2"
    assert settings.ground.hardware.constants.matmul_efficiency == 0.5
    assert "uncalibrated" in settings.cost_text


def tables(folder: Path, *, without: str = "", packed: bool = True) -> str:
    """The committed times of the L40S, in a folder of one's own."""
    lines = gzip.decompress((FOLDER / "l40s.csv.gz").read_bytes()).decode().splitlines(keepends=True)
    kept = [line for line in lines if not without or not re.match(rf"(sizes,)?\w+,{without},", line)]
    (folder / "k").mkdir(exist_ok=True)
    if packed:
        (folder / "k" / "all.csv.gz").write_bytes(gzip.compress("".join(kept).encode()))
    else:
        by_kernel: dict[str, list[str]] = {}
        for line in kept[1:]:
            words = line.split(",")
            by_kernel.setdefault(words[2] if words[0] == "sizes" else words[1], []).append(line)
        for kernel, own in by_kernel.items():
            (folder / "k" / f"{kernel}.csv").write_text(kept[0] + "".join(own))
    return "k"


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "a file a kernel"])
@pytest.mark.parametrize("system", FAMILIES)
def test_kernels_of_ones_own_compose_the_same_steps_as_the_packages(system, packed, own_folder):
    # Diffusion LLMs are charged the overhead of the L40S's stored fit, of which composed steps heed nothing else.
    write_fit(own_folder, step_overhead_s=load_calibration("l40s").step_overhead_s)
    fit = {"calibration": "fit.json"} if system == "dllm-serve" else {}
    write_card(own_folder, AS_L40S, kernels=tables(own_folder, packed=packed), **fit)
    ours = record(cell(system))
    assert ours.obtained == "composed"
    assert ours.manifest["calibration"].startswith("l4, composed of")
    module(
        own_folder,
        "parts = [replace(part, gpu='l40s') if hasattr(part, 'gpu') else part for part in HERE.parts]",
        "ON = replace(HERE, gpu='l40s', parts=tuple(parts), digest='')",
    )
    theirs = record(cell(system, "pythons:ON"))
    assert theirs.manifest["calibration"].startswith("l40s, composed of")
    assert ours.tables["requests"]["finished_s"] == theirs.tables["requests"]["finished_s"]


def test_a_table_is_a_part_of_what_a_run_rests_on(own_folder):
    write_card(own_folder, kernels=tables(own_folder))
    before = prepare(cell("dllm-serve")).cell.key
    forget()
    path = own_folder / "k" / "all.csv.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + b"\n"))
    assert prepare(cell("dllm-serve")).cell.key != before


@pytest.mark.parametrize("kernel", ["gemm", "prompt", "decode"])
def test_a_missing_table_is_refused_by_name(kernel, own_folder):
    write_card(own_folder, kernels=tables(own_folder, without=kernel))
    with pytest.raises(UserError, match=f"kernels='.*k' has no {kernel} table of vllm: add one, or leave kernels out"):
        platform("mine.yaml")


def test_a_model_that_the_tables_lack_is_refused_before_any_run(own_folder):
    write_card(own_folder, AS_L40S, kernels=tables(own_folder, without="all-reduce"))
    with pytest.raises(UserError, match="has no all-reduce table of l4"):
        prepare(cell("ampd"))
    prepare(cell("dllm-serve"))


def test_composed_steps_are_refused_without_tables(own_folder):
    write_card(own_folder)
    for system in FAMILIES:
        with refuses("card='l4'"):
            prepare(cell(system, cost="composed"))


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new", "says"), REFUSED)
def test_what_a_file_may_not_say(old, new, says, own_folder):
    text = {"": new, "+": CARD + new}.get(old) or CARD.replace(old, new)
    write_card(own_folder, text)
    refused(repro("bench --platform mine.yaml --dry-run"), "platform='mine.yaml'", says)
    assert [path.name for path in own_folder.iterdir()] == ["mine.yaml"]


def test_files_that_are_none(own_folder):
    refused(repro("bench --platform nosuch.yaml"), "platform='nosuch.yaml'")
    refused(
        repro("plan-cluster --model Qwen3-32B --trace gaia --gpus 8 --hardware nosuch.yml"), "there is no such file"
    )
    (own_folder / "k").mkdir()
    (own_folder / "k" / "a.csv").write_text("no json\n1,2\n")
    write_card(own_folder, kernels="k")
    refused(repro("bench --platform mine.yaml"), "cannot be read as a kernel table", "write it as docs/silicon.md says")


def test_a_fit_of_another_card_is_refused(own_folder):
    write_fit(own_folder, card="l5")
    write_card(own_folder, calibration="fit.json")
    refused(repro("bench --platform mine.yaml"), "fit.json' is of 'l5' and the card is 'l4': fit it again")


def test_a_card_is_itself_and_prints_as_its_name():
    numbers = dict.fromkeys(("bf16_tflops", "memory_bandwidth_gb_s", "memory_bytes", "pcie_gb_s"), 1)
    card = Gpu(name="a", nvlink_gb_s=None, source="", **numbers)
    assert gpu(card) is card
    assert f"{card}" == "a"
    assert Platform(name="p", title="p", executor="roofline", gpu=card).gpu is card
