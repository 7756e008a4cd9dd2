"""A calibration that is made up, and rooflines of tiny models with and without it."""

from support.tiny_models import GQA, TinyModel

from engines.cost.roofline import L40S, Calibration, Roofline
from engines.models.shape import ModelShape

CALIBRATION = Calibration(
    gpu=L40S.name,
    matmul_efficiency=0.5,
    attention_efficiency=0.4,
    bandwidth_efficiency=0.6,
    step_overhead_s=1e-3,
    fitted_on=("test",),
    note="made up",
)


def roofline(model: TinyModel = GQA, calibration: Calibration | None = None) -> Roofline:
    return Roofline(ModelShape.from_config(model.config, name=model.name, dtype_bytes=4), L40S, calibration)
