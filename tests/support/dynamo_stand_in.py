"""A stand-in for Dynamo's environment: its frontend's HTTP, and as much of its Python interface as a component that serves uses.

Requests reach the component in the form that Dynamo 1.6.1 hands them over in, and answers leave as it sends them. Run as a program it is
that environment's python; the "frontend" tells its port by a file, and the component's own process answers there.
"""

import asyncio
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def write_dynamo(environment: Any) -> None:
    """Where ``environment`` says it is."""
    from baselines.servers.environment import MARK

    python = environment.python
    python.parent.mkdir(parents=True)
    tests = Path(__file__).parents[1]
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH={tests}:$PYTHONPATH exec {sys.executable} -m support.dynamo_stand_in "$@"\n'
    )
    python.chmod(0o755)
    mark = {"recipe": environment.recipe, "packages": {"ai-dynamo": "1.6.1"}}
    (environment.folder / MARK).write_text(json.dumps(mark))


class Context:
    """What a component is told of a request's client; for one event loop."""

    def __init__(self) -> None:
        self._left = asyncio.get_running_loop().create_future()

    def stop(self) -> None:
        """The client leaves."""
        if not self._left.done():
            self._left.set_result(True)

    def is_stopped(self) -> bool:
        return self._left.done()

    def async_killed_or_stopped(self) -> asyncio.Future[bool]:
        return asyncio.shield(self._left)


class InvalidArgument(Exception):
    """The only error whose words a client gets to read."""


def handed_over(body: dict[str, Any], headers: Any) -> dict[str, Any]:
    """A request as a component gets it."""
    found = {
        "model": body["model"],
        "token_ids": body["prompt"],
        "stop_conditions": {
            "max_tokens": body.get("max_tokens"),
            "stop": None,
            "ignore_eos": body.get("ignore_eos"),
            "stop_token_ids_hidden": None,
        },
        "sampling_options": {"n": None, "temperature": body.get("temperature"), "seed": None},
        "output_options": {"logprobs": None},
        "annotations": [],
        "routing": {},
    }
    if (session := headers.get("x-dynamo-session-id")) is not None:
        is_final = {"session_final": True} if headers.get("x-dynamo-session-final") == "true" else {}
        found["agent_context"] = {"session_id": session, **is_final, "input_trigger": "other"}
    return found


class Endpoint:
    async def serve_endpoint(self, generate: Callable[..., Any]) -> None:
        from aiohttp import web

        async def models(request: web.Request) -> web.Response:
            return web.json_response({"data": [{"id": REGISTERED[0]}]})

        async def complete(request: web.Request) -> web.StreamResponse:
            body = await request.json()
            answer = generate(handed_over(body, request.headers), Context())
            response = web.StreamResponse()
            await response.prepare(request)
            count = 0
            try:
                async for said in answer:
                    count += len(said["token_ids"])
                    choice = {"text": "", "index": 0, "finish_reason": said["finish_reason"]}
                    ids = {"completion_token_ids": said["token_ids"]}
                    await response.write(_event({"choices": [choice], "usage": None, "nvext": ids}))
            except Exception as error:
                said = str(error) if isinstance(error, InvalidArgument) else "Internal server error"
                await response.write(_event({"error": {"message": said}}) + b"data: [DONE]\n\n")
                return response
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
            await response.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
            return response

        app = web.Application()
        app.router.add_get("/health", lambda request: web.json_response({}))
        app.router.add_get("/v1/models", models)
        app.router.add_post("/v1/completions", complete)
        runner = web.AppRunner(app)
        await runner.setup()
        while not (port := _port_file()).exists():
            await asyncio.sleep(0.01)
        await web.TCPSite(runner, "127.0.0.1", int(port.read_text())).start()
        await asyncio.Event().wait()


REGISTERED: list[str] = []


async def register_model(*args: Any, model_name: str, **kwargs: Any) -> None:
    assert (Path(args[3]) / "tokenizer.json").is_file()
    REGISTERED.append(model_name)


def dynamo_worker() -> Callable[..., Any]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda: function(SimpleNamespace(endpoint=lambda name: Endpoint()))

    return decorate


def _port_file() -> Path:
    return Path(os.environ["DYN_FILE_KV"]).with_name("port")


def _event(said: Any) -> bytes:
    return b"data: " + json.dumps(said).encode() + b"\n\n"


def _module(name: str, **names: Any) -> None:
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(names)


def main(arguments: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    if (said := os.environ.get("FAKE_SERVER_PIDS")) is not None:
        with Path(said).open("a") as file:
            file.write(f"{os.getpid()}\n")
    if "dynamo.frontend" in arguments:
        port = arguments[arguments.index("--http-port") + 1]
        temporary = _port_file().with_suffix(".partial")
        temporary.write_text(port)
        temporary.replace(_port_file())
        time.sleep(600)
    kinds = SimpleNamespace(Tokens=1, Chat=1, Completions=2, Aggregated=1)
    _module("uvloop", run=asyncio.run)
    _module("dynamo")
    _module("dynamo.llm", ModelInput=kinds, ModelType=kinds, WorkerType=kinds, register_model=register_model)
    _module("dynamo.llm.exceptions", InvalidArgument=InvalidArgument)
    _module("dynamo.runtime", dynamo_worker=dynamo_worker)
    place = arguments.index("-m") + 1
    sys.argv = arguments[place:]
    runpy.run_module(arguments[place], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
