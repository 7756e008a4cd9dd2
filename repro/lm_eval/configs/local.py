"""The classes that the files beside it name: lm-eval reads ``!function`` from a module in the same folder."""

from __future__ import annotations

from repro.lm_eval.command import Gsm8k, HumanEval, MiniCode, MiniGsm

__all__ = ["Gsm8k", "HumanEval", "MiniCode", "MiniGsm"]
