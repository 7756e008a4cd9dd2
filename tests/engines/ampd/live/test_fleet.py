"""Workers end with who started them, whatever they were waiting for."""

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
from support.live import needs_redis
from support.processes import ends, is_alive

from engines.ampd.live.fleet import Fleet
from engines.ampd.live.store import RedisServer, Store
from engines.ampd.live.worker import WorkerSpec
from engines.errors import RunError
from engines.models.qwen2_config import tiny_causal
from engines.policies.views import PrefillQueue
from repro.paths import REPO

pytestmark = needs_redis

SPEC = WorkerSpec(
    worker_id=0,
    role="decode",
    url="redis://127.0.0.1:1",
    prefix="{run}",
    model=tiny_causal(d_model=32, n_layers=2),
    make_queue=PrefillQueue,
    num_tokens=1600,
    max_len=256,
    num_slots=4,
    lease_s=600.0,
    outage_s=600.0,
)
PARENT = """
import sys
from dataclasses import replace
from multiprocessing import get_context
from engines.ampd.live.fleet import run_worker
from tests.engines.ampd.live.test_fleet import SPEC

process = get_context("fork").Process(target=run_worker, args=(replace(SPEC, url=sys.argv[1]),), daemon=True)
process.start()
print(process.pid, flush=True)
process.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_worker_that_waits_for_redis_ends_with_its_parent():
    path = os.pathsep.join((str(REPO), str(REPO / "tests")))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, f"redis://127.0.0.1:{mute.getsockname()[1]}"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        connection, _ = mute.accept()
        assert is_alive(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert ends(pid)
        connection.close()


def test_a_stop_that_is_interrupted_waits_for_no_worker(tmp_path, monkeypatch):
    with RedisServer(tmp_path) as server:
        store = Store.connect(server.url, SPEC.prefix)
        store.call("create", 10.0)
        with Fleet([replace(SPEC, url=server.url)], store, start_s=600.0) as fleet:
            (process,) = fleet._processes.values()
            os.kill(fleet.pid(0), signal.SIGSTOP)  # it will not hear that it is to end

            def interrupted(timeout: float | None = None) -> None:
                monkeypatch.undo()
                raise KeyboardInterrupt

            monkeypatch.setattr(process, "join", interrupted)
            with pytest.raises(KeyboardInterrupt):
                fleet.stop()
            process.join()
            assert process.exitcode == -signal.SIGKILL


def test_a_worker_that_dies_before_it_takes_part_is_one_sentence(tmp_path, monkeypatch):
    """It asks a Redis that never answers, so that it cannot be quicker than its end."""
    with RedisServer(tmp_path) as server, socket.create_server(("127.0.0.1", 0)) as mute:
        store = Store.connect(server.url, SPEC.prefix)
        store.call("create", 10.0)
        start = Fleet.start

        def doomed(self: Fleet, worker_id: int) -> None:
            start(self, worker_id)
            os.kill(self.pid(worker_id), signal.SIGKILL)
            self._processes[worker_id].join()

        monkeypatch.setattr(Fleet, "start", doomed)
        url = f"redis://127.0.0.1:{mute.getsockname()[1]}"
        specs = [replace(SPEC, url=url, worker_id=number) for number in (0, 1)]
        with pytest.raises(RunError, match="worker 0 was killed by signal 9 before it took part"):
            Fleet(specs, store, start_s=600.0)
