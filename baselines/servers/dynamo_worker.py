"""A worker with known times behind Dynamo's frontend; runs as a program in Dynamo's environment.

It prefills prompts one after the other, at ``prefill_us`` a token; then an answer gets a token every ``decode_ms``. Time beyond
that, as a client measures it, is due to frontend, router and transport. A client that leaves takes no more of the worker's time.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

FIRST_ID = 32
"""The first of the ids that answers use; they are ordinary tokens of any vocabulary."""
_NUM_IDS = 64


@dataclass(kw_only=True)
class KnownTimes:
    prefill_s: float
    """Seconds per prompt token."""
    decode_s: float
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """The prompt that is prefilled holds this lock; the others wait in order of arrival."""
    _free_s: float = field(default=0.0, init=False)
    """When the last prompt was fully prefilled, or given up."""

    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        loop = asyncio.get_running_loop()
        abort = asyncio.ensure_future(context.async_killed_or_stopped())

        async def is_there_at(time_s: float) -> bool:
            await asyncio.wait((abort,), timeout=max(0.0, time_s - loop.time()))
            return not context.is_stopped()

        prompt, arrived_s = request["token_ids"], loop.time()
        num_tokens = (request.get("stop_conditions") or {}).get("max_tokens") or 16
        try:
            async with self._turn:
                begun_s = max(self._free_s, arrived_s)
                first_s = begun_s + len(prompt) * self.prefill_s
                if context.is_stopped():
                    return
                is_there = await is_there_at(first_s)
                self._free_s = first_s if is_there else max(begun_s, loop.time())
            for k in range(num_tokens):
                # Sleep until due times, so that one late token does not delay the next ones.
                if not await is_there_at(first_s + k * self.decode_s):
                    return
                token = FIRST_ID + (len(prompt) + k) % _NUM_IDS
                yield {"token_ids": [token], "finish_reason": "length" if k == num_tokens - 1 else None}
        finally:
            abort.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--model-name", required=True)
    parser.add_argument("--block-size", type=int, required=True)
    parser.add_argument("--prefill-us", type=float, required=True)
    parser.add_argument("--decode-ms", type=float, required=True)
    options = parser.parse_args()

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
            options.model_path,
            model_name=options.model_name,
            worker_type=WorkerType.Aggregated,
            kv_cache_block_size=options.block_size,
            ignore_weights=True,
        )
        times = KnownTimes(prefill_s=options.prefill_us / 1e6, decode_s=options.decode_ms / 1e3)
        await endpoint.serve_endpoint(times.generate)

    uvloop.run(worker())


if __name__ == "__main__":
    main()
