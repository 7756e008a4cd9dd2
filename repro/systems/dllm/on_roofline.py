"""A deployment on a simulated card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engines.dllm.engine import Engine
from engines.dllm.executor.roofline import RooflineExecutor
from engines.hardware.catalogue import gpu
from engines.hardware.roofline import Roofline
from repro.systems.calibration import load_calibration
from repro.systems.dllm.deployment import Deployment


@contextmanager
def serving(deployment: Deployment) -> Iterator[tuple[Engine, Deployment]]:
    card = deployment.settings.platform.gpu
    assert card is not None, "settings refuse the roofline where there is no GPU model"
    calibration = deployment.calibration or load_calibration(card)
    roofline = Roofline(deployment.settings.shape, gpu(card), calibration)
    executor = executor_on(deployment, roofline, is_upstream=deployment.batching.is_upstream)
    yield Engine(deployment.scheduler(), executor), deployment


def executor_on(deployment: Deployment, roofline: Roofline, *, is_upstream: bool) -> RooflineExecutor:
    """What charges the deployment's steps to a roofline; ``is_upstream`` charges the copies of published code too."""
    method = deployment.method
    if deployment.batching.kind == "packed":
        return method.packed_roofline(roofline, deployment.config, deployment.sampler)
    copied = deployment.sampler.reduction_traffic_per_value(roofline.shape.dtype_bytes) if is_upstream else 0
    return deployment.published.static_roofline(
        roofline, deployment.config, deployment.sampler, copied_bytes_per_logit=copied
    )
