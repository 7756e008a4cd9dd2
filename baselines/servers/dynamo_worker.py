"""A worker of known times behind Dynamo's frontend; run as a program in Dynamo's environment.

Prompts are prefilled one after the other, ``prefill_us`` a token; then an answer has a token every ``decode_ms``. What a client
measures beyond that is the frontend's, the router's and the transport's.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

FIRST_ID = 32
"""Of the ids that answers consist of: ordinary ones of any vocabulary."""
NUM_IDS = 64


@dataclass(kw_only=True)
class KnownTimes:
    prefill_s: float
    """A token."""
    decode_s: float
    _free_s: float = field(default=0.0, init=False)
    """When the last prompt that was taken is prefilled."""

    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        loop = asyncio.get_running_loop()
        prompt = request["token_ids"]
        num_tokens = (request.get("stop_conditions") or {}).get("max_tokens") or 16
        self._free_s = max(self._free_s, loop.time()) + len(prompt) * self.prefill_s
        first_s = self._free_s
        for k in range(num_tokens):
            # Due times, not pauses: what is late once is not late for ever.
            await asyncio.sleep(max(0.0, first_s + k * self.decode_s - loop.time()))
            if context.is_stopped():
                return
            token = FIRST_ID + (len(prompt) + k) % NUM_IDS
            yield {"token_ids": [token], "finish_reason": "length" if k == num_tokens - 1 else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--model-name", required=True)
    parser.add_argument("--block-size", type=int, required=True)
    parser.add_argument("--prefill-us", type=float, required=True)
    parser.add_argument("--decode-ms", type=float, required=True)
    given = parser.parse_args()

    import uvloop
    from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
    from dynamo.runtime import dynamo_worker

    @dynamo_worker()
    async def worker(runtime: Any) -> None:
        endpoint = runtime.endpoint("known.backend.generate")
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat | ModelType.Completions,
            endpoint,
            given.model_path,
            model_name=given.model_name,
            worker_type=WorkerType.Aggregated,
            kv_cache_block_size=given.block_size,
            ignore_weights=True,
        )
        times = KnownTimes(prefill_s=given.prefill_us / 1e6, decode_s=given.decode_ms / 1e3)
        await endpoint.serve_endpoint(times.generate)

    uvloop.run(worker())


if __name__ == "__main__":
    main()
