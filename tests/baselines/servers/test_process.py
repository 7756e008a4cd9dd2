"""Servers are stopped whatever happens to those who started them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.mock_openai import MockOpenAI, mock_server
from support.processes import ends

from baselines.servers import process
from baselines.servers.process import WARDEN, Address, Command, free_port, running
from engines.errors import RunError
from engines.runtime.machine import SETTLED
from repro.paths import REPO

PATH = {"PYTHONPATH": os.pathsep.join((str(REPO), str(REPO / "tests")))}


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a fake server writes who it is and who its child is."""
    path = tmp_path / "pids"
    monkeypatch.setenv("FAKE_SERVER_PIDS", str(path))
    return path


def all_of(pids: Path) -> list[int]:
    return [int(word) for line in pids.read_text().splitlines() for word in line.split()[:2]]


@contextmanager
def fake(folder: Path, how: str, *, within_s: float = 60.0, paths: tuple[str, ...] = ("/health",)) -> Iterator[str]:
    port = free_port()
    command = Command(
        name="fake",
        arguments=(sys.executable, "-m", "support.fake_server", "--port", str(port)),
        environment={**PATH, "FAKE_SERVER": how},
    )
    url = f"http://127.0.0.1:{port}"
    with running("fake", [command], Address(url=url, model="served", paths=paths), folder=folder, within_s=within_s):
        yield url


def test_a_server_and_its_children_end_with_the_body(tmp_path, pids):
    with fake(tmp_path, "serve"):
        assert not any(ends(pid, 0) for pid in all_of(pids))
    assert all(ends(pid) for pid in all_of(pids))


def test_a_server_that_ignores_signals_is_killed(tmp_path, pids, monkeypatch):
    monkeypatch.setattr(process, "GRACE_S", 0.1)
    with fake(tmp_path, "deaf"):
        pass
    assert all(ends(pid) for pid in all_of(pids))


def test_ctrl_c_stops_it(tmp_path, pids):
    with pytest.raises(KeyboardInterrupt), fake(tmp_path, "serve"):
        raise KeyboardInterrupt
    assert all(ends(pid) for pid in all_of(pids))


def test_a_server_that_ends_at_once_says_why(tmp_path):
    with (
        pytest.raises(
            RunError, match=r"fake ended while starting \(exit code 1\): ValueError: there is no such model; all"
        ),
        fake(tmp_path, "fail"),
    ):
        pass
    assert "no such model" in (tmp_path / "fake.log").read_text()


def test_a_server_that_never_answers_is_given_up(tmp_path, pids):
    with (
        pytest.raises(
            RunError,
            match=r"fake is not ready after start_timeout_s=0.5, it does not answer \(.*refused\): nothing; all",
        ),
        fake(tmp_path, "silent", within_s=0.5),
    ):
        pass
    assert not pids.exists() or all(ends(pid) for pid in all_of(pids))


def test_one_that_does_not_list_the_model_or_says_no_is_not_ready(tmp_path):
    with fake(tmp_path, "serve") as url:
        assert Address(url=url, model="served").missing() is None
        assert Address(url=url, model="other").missing() == "it lists no model 'other'"
        assert Address(url=url, model="served", paths=("/nothing",)).missing() == "it does not answer (status 404)"
        assert Address(url=url, model="served", num_workers=1).missing() == ("it does not answer as such servers do"), (
            "it lists no workers"
        )
    assert "refused" in str(Address(url=url, model="served").missing())
    raw = {"get /health": lambda: [b"HTTP/1.1 307 X\r\nLocation: http://other.example/health\r\n\r\n"]}
    with mock_server(MockOpenAI(raw=raw)) as url:
        said = Address(url=url, model="mock", paths=("/health",)).missing()
    assert said == "it does not answer (status 307, a redirect to the host 'other.example', which is not followed)"


def test_it_is_ready_once_every_worker_is_there():
    listed = [[(1, "generate"), (1, "flush")], [(1, "generate"), (2, "flush")], [(1, "generate"), (2, "generate")]]
    said = [{"instances": [{"instance_id": i, "endpoint": name} for i, name in each]} for each in listed]
    with mock_server(MockOpenAI(health=lambda: said.pop(0))) as url:
        address = Address(url=url, model="mock", num_workers=2)
        waits = [address.missing() for _ in listed]
    assert waits == ["1 of 2 workers are there", "1 of 2 workers are there", None]


def test_no_server_outlives_who_started_it(tmp_path, pids):
    """Not even one that was killed, and could tell nobody."""
    server = (sys.executable, "-m", "support.fake_server")
    warden = [sys.executable, "-I", "-S", str(WARDEN), "20", "--", *server]
    program = f"import subprocess; subprocess.Popen({warden!r}, stdin=subprocess.PIPE); input()"
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, env={**os.environ, **PATH, "FAKE_SERVER": "silent"}
    )
    while not pids.exists() or not pids.read_text().endswith("\n"):
        assert parent.poll() is None
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    assert all(ends(pid) for pid in all_of(pids))


def test_a_server_starts_without_what_we_set_for_ourselves(tmp_path, pids, monkeypatch):
    """A limit that keeps our rows independent of their company would slow a rival down; a user's own limit is passed on."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv(SETTLED, "PYTORCH_ALLOC_CONF")
    with fake(tmp_path, "serve"):
        its = Path(f"/proc/{all_of(pids)[0]}/environ").read_text(encoding="utf-8", errors="replace").split("\0")
    assert "ONEDNN_MAX_CPU_ISA=AVX2" in its
    assert not any(each.startswith(("PYTORCH_ALLOC_CONF=", f"{SETTLED}=")) for each in its)
