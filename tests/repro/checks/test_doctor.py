import sys
from dataclasses import replace

import pytest
from support.cells import RTX4090
from support.tables import data_beside

import repro.checks.doctor
from repro.checks.doctor import CARD_TOLERANCE, OPTIONAL, FoundGpu, Item, Machine, inspect_machine, rows_for
from repro.families.platforms import PLATFORMS, DllmPart

CASES = data_beside(__file__, "cases")

LAPTOP = Machine(
    python=(3, 12, 1),
    torch="2.13.0+cpu",
    torch_error=None,
    cuda=None,
    gpus=(),
    has_nvidia_driver=False,
    cpu="A Processor 9000",
    cores=2,
    memory_bytes=8 * 10**9,
    disk_free_bytes=50 * 10**9,
    packages=tuple((name, None) for name in OPTIONAL),
    data_dir=None,
    data_dir_error=None,
    missing_weights=(),
    has_git=True,
    commit="0123456789abcdef",
)
H200 = FoundGpu(name="NVIDIA H200", memory_bytes=141 * 10**9)
SERVER = replace(LAPTOP, torch="2.13.0", cuda="13.0", gpus=(H200,), has_nvidia_driver=True)


def row(machine: Machine, item: str) -> Item:
    (found,) = (row for row in rows_for(machine) if row.item == item)
    return found


def test_a_laptop_measures_the_small_model_and_simulates_the_cards():
    assert row(LAPTOP, "cpu-tiny measured") == Item(
        item="cpu-tiny measured", status="ok", detail="yes, on A Processor 9000"
    )
    assert row(LAPTOP, "cpu-tiny simulated").status == "no"
    for name in ("rtx4090", "l40s"):
        assert row(LAPTOP, f"{name} measured") == Item(item=f"{name} measured", status="no", detail="no CUDA device")
        simulated = row(LAPTOP, f"{name} simulated")
        assert simulated.status == "ok"
        assert f"roofline of {name}" in simulated.detail
        assert "composed of vllm kernels measured on the l40s" in simulated.detail, "what a run is charged by"


def test_a_platform_of_one_card_is_no_cluster():
    assert "simulated only" in row(SERVER, "h200x32 measured").detail
    for name in ("h200-sdar-8b", "h200-llada2-mini"):
        assert row(LAPTOP, f"{name} measured").detail == "no CUDA device"
        assert row(SERVER, f"{name} measured").detail == "yes, numbers are those of NVIDIA H200"
        assert "composed of vllm kernels measured on the h200" in row(LAPTOP, f"{name} simulated").detail
    assert "transferred to the h20" in row(LAPTOP, "h20-llada2-mini simulated").detail


@pytest.mark.parametrize("machine", [LAPTOP, SERVER])
def test_every_platform_has_a_row_for_each_executor(machine):
    items = [row.item for row in rows_for(machine)]
    assert len(set(items)) == len(items)
    for name in PLATFORMS:
        assert {f"{name} measured", f"{name} simulated"} <= set(items)


def test_an_endpoint_is_measured_where_there_is_a_client():
    assert row(LAPTOP, "endpoint measured").detail == "aiohttp is not installed: pip install 'dllm-serve-repro[http]'"
    machine = replace(LAPTOP, torch=None, packages=(*LAPTOP.packages, ("aiohttp", "3.9.0")))
    assert row(machine, "endpoint measured").status == "ok"
    assert row(machine, "endpoint simulated").status == "no"


def test_a_server_names_the_card_its_numbers_would_be_of():
    assert row(SERVER, "rtx4090 measured").detail == "yes, numbers are those of NVIDIA H200"
    assert row(SERVER, "GPU") == Item(item="GPU", status="ok", detail="NVIDIA H200, 141.0 GB")
    assert row(SERVER, "torch").detail == "2.13.0, CUDA 13.0"


def test_the_largest_card_counts():
    small = FoundGpu(name="small", memory_bytes=8 * 10**9)
    two = replace(SERVER, gpus=(small, H200))
    assert row(two, "l40s measured").status == "ok"
    only_small = row(replace(SERVER, gpus=(small,)), "rtx4090 measured")
    assert only_small.status == "no"
    assert "small has 8.0 GB and the platform plans with 24.0 GB" in only_small.detail


@pytest.mark.parametrize(("share", "status"), [(CARD_TOLERANCE, "ok"), (CARD_TOLERANCE - 0.01, "no")])
def test_a_card_may_report_a_little_less_than_its_name(share, status):
    card = FoundGpu(name="card", memory_bytes=round(share * RTX4090.part(DllmPart).memory_bytes))
    assert row(replace(SERVER, gpus=(card,)), "rtx4090 measured").status == status


@pytest.mark.parametrize(("change", "item", "status", "detail"), CASES["machines"])
def test_what_is_wrong_is_said_where_it_matters(change, item, status, detail):
    """What is optional, or costs a run only its commit, never fails."""
    found = row(replace(LAPTOP, **change), item)
    assert found.status == status
    assert detail in found.detail


def test_a_missing_checkpoint_does_not_stop_a_large_card():
    assert row(replace(SERVER, missing_weights=("config.json",)), "rtx4090 measured").status == "ok"


def test_data_sets_come_from_the_files_that_are_there(tmp_path):
    assert row(LAPTOP, "dataset burst").detail == "embedded generator"
    (tmp_path / "burstgpt").mkdir()
    (tmp_path / "burstgpt" / "BurstGPT_1.csv").touch()
    machine = replace(LAPTOP, data_dir=tmp_path)
    assert row(machine, "dataset burst").detail == "local file burstgpt/BurstGPT_1.csv"
    assert row(machine, "dataset osc").detail == "embedded generator"


def test_looks_at_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("REPRO_DATA_DIR", str(tmp_path / "absent"))
    machine = inspect_machine()
    assert machine.python == sys.version_info[:3]
    assert machine.torch is not None
    assert machine.torch_error is None
    assert machine.disk_free_bytes > 0
    assert machine.data_dir is None
    assert "is not a directory" in (machine.data_dir_error or "")
    monkeypatch.setenv("REPRO_DATA_DIR", str(tmp_path))
    assert inspect_machine().data_dir == tmp_path


def test_a_torch_that_does_not_load_is_a_row_not_a_crash(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    machine = inspect_machine()
    assert (machine.cuda, machine.gpus) == (None, ())
    assert row(machine, "cpu-tiny measured").status == "no"


def test_a_package_that_only_looks_importable_is_not_there(monkeypatch):
    """``datasets/`` at the root imports as an empty namespace, as ``baselines`` does: neither is an installed library."""
    monkeypatch.setattr(repro.checks.doctor, "OPTIONAL", {"baselines": "x", "numpy": "y"})
    packages = dict(inspect_machine().packages)
    assert packages["baselines"] is None
    assert packages["numpy"] is not None
