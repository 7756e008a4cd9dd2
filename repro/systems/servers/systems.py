"""The servers by name."""

from __future__ import annotations

from baselines.servers.dynamo import Dynamo
from baselines.servers.sglang import Sglang
from baselines.servers.vllm import Vllm
from repro.systems.servers.system import ServerSystem

VLLM = ServerSystem(
    name="vllm",
    title="vLLM",
    summary="vLLM's own server, started here ('repro install vllm') or at --url; measured",
    launch=Vllm,
)
DYNAMO = ServerSystem(
    name="dynamo",
    title="Dynamo",
    summary="Dynamo's own frontend before its mocker or other workers, started here ('repro install dynamo') or at --url; measured",
    launch=Dynamo,
)
SGLANG = ServerSystem(
    name="sglang",
    title="SGLang",
    summary="SGLang's own server on a GPU ('repro install sglang') or at --url; measured",
    launch=Sglang,
)
