"""The servers by name, and the environments that they run in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baselines.servers import dynamo, sglang, vllm
from baselines.servers.environment import ServerEnvironment, machine_device
from engines.errors import UserError
from repro.systems.servers.system import ServerSystem

VLLM = ServerSystem(name="vllm", title="vLLM", launch=vllm.Vllm)
DYNAMO = ServerSystem(name="dynamo", title="Dynamo", launch=dynamo.Dynamo)
SGLANG = ServerSystem(name="sglang", title="SGLang", launch=sglang.Sglang)

ENVIRONMENTS: Mapping[str, Sequence[ServerEnvironment]] = {
    "vllm": tuple(vllm.ENVIRONMENTS.values()),
    "dynamo": tuple(dynamo.ENVIRONMENTS.values()),
    "sglang": (sglang.ENVIRONMENT,),
    "sglang-router": (sglang.ROUTER_ENVIRONMENT,),
}


def environment_of(name: str, device: str | None) -> ServerEnvironment:
    """For the device, or this machine's; the only one there is, where none is asked for."""
    if name not in ENVIRONMENTS:
        raise UserError(f"server={name!r} is unknown: use one of {', '.join(ENVIRONMENTS)}")
    made = {each.device: each for each in ENVIRONMENTS[name]}
    if device is None:
        return made.get(machine_device()) or next(iter(made.values()))
    if device not in made:
        raise UserError(f"device={device!r} is none that {name} is made for: use {' or '.join(made)}")
    return made[device]  # type: ignore[index]
