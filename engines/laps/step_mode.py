"""The names of ``engines.ar.step_mode``, for code written before they moved there."""

from engines.ar.step_mode import FALLBACK, Bucket, Fallback, Rung, StepMode, holds, padded_tokens

__all__ = ["FALLBACK", "Bucket", "Fallback", "Rung", "StepMode", "holds", "padded_tokens"]
