"""AMPD's coordinator behind NVIDIA Dynamo's frontend: a routing component, run as a program in Dynamo's environment.

The frontend tokenizes a request and hands it to the endpoint that registered the model: here, a ``SessionIntake``. Its coordinator
binds the session, and routes the prefill to a prefill worker or to the session's own worker. This program does not need torch.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from engines.ampd.live.intake import RouterSpec, SessionIntake
from engines.errors import UserError

ENDPOINT = "ampd.router.generate"
_BLOCK_SIZE = 16
"""The tokens of a K/V block that we tell the frontend. None of its own routers reads them here."""


def main(spec: RouterSpec) -> None:
    import uvloop
    from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
    from dynamo.llm.exceptions import InvalidArgument
    from dynamo.runtime import dynamo_worker

    intake = SessionIntake(spec.deciding.coordinator(), spec.limits)

    async def generate(request: Any, context: Any) -> AsyncIterator[dict[str, Any]]:
        try:
            async with aclosing(intake.generate(request, context)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except UserError as error:
            raise InvalidArgument(str(error)) from None  # the only kind of error whose message the frontend passes on

    @dynamo_worker()
    async def router(runtime: Any) -> None:
        endpoint = runtime.endpoint(ENDPOINT)
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat | ModelType.Completions,
            endpoint,
            spec.model,
            model_name=spec.served_name,
            worker_type=WorkerType.Aggregated,
            kv_cache_block_size=_BLOCK_SIZE,
            ignore_weights=True,
        )
        serving = asyncio.ensure_future(endpoint.serve_endpoint(generate))
        keeping = asyncio.ensure_future(intake.keep())
        done, _ = await asyncio.wait((serving, keeping), return_when=asyncio.FIRST_COMPLETED)
        keeping.cancel()
        for future in done:
            future.result()  # raises the error that ended it

    uvloop.run(router())


if __name__ == "__main__":
    main(RouterSpec.read(Path(sys.argv[1])))
