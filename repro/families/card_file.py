"""A user's own card, in a YAML file: its datasheet, what was measured on it, and what each family runs on it by default.

We derive all that the file leaves out from the card: models and budgets from its memory, rates from its matrix peak.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

from engines.cluster.hardware import Hardware, cost_constants
from engines.cost.kernels import Card, load_folder
from engines.cost.roofline import GB, GPUS, L40S, CardCalibration, Gpu
from engines.dllm.config import EngineConfig
from engines.dllm.memory import divide_memory
from engines.errors import UserError, require
from engines.knobs import Checked, Range
from engines.models.checkpoint import config_of, digest_of
from engines.models.shape import ModelShape, model_shape
from repro.families.cluster.system import autoregressive_shape
from repro.families.platforms import (
    ArPart,
    DllmPart,
    Platform,
    PrefillPart,
    checked_section,
    paper_objectives,
    platform,
)
from repro.files import file_cache, one_line, read_yaml, unreadable_yaml

Amount = Annotated[float, Range(above=0, most=1e9)]
_DLLM_MODEL = "llada-8b"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CATALOGUE = frozenset(card.name for card in GPUS)


@dataclass(frozen=True, kw_only=True)
class CardFile(Checked):
    """The fields of a card's file. The fields in ``REQUIRED`` must be given."""

    name: str
    bf16_tflops: Amount
    """Dense BF16 matrix peak with float32 accumulation. Vendors also print twice this number, with sparsity."""
    memory_bandwidth_gb_s: Amount
    memory_gb: Amount
    """Decimal, as vendors print it: 24 is 24e9 bytes."""
    pcie_gb_s: Amount = 64.0
    """x16 slot, both directions together [default: PCIe Gen4's]."""
    nvlink_gb_s: Amount | None = None
    """Per GPU, both directions together; none by default."""
    source: str = "not said"
    num_gpus: Annotated[int, Range(1, 4096)] = 64
    """The most GPUs in a cluster of this card, with eight to a server."""
    kernels: str | None = None
    """A folder of kernel tables, relative to the file. We compose the time of a step from the times in them."""
    calibration: str | None = None
    """The file that repro calibrate has fitted, relative to this file."""
    dllm: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``DllmPart`` that replace those derived from the card, as ``ampd`` does for ``ArPart`` and ``laps`` for ``PrefillPart``."""
    ampd: Mapping[str, Any] = field(default_factory=dict)
    laps: Mapping[str, Any] = field(default_factory=dict)


SECTIONS = ("dllm", "ampd", "laps")
REQUIRED = ("name", "bf16_tflops", "memory_bandwidth_gb_s", "memory_gb")


def platform_of(path: str, name: str | None) -> Platform:
    """The platform of a file. If ``name`` is given, it must be that of the card in the file, or this raises UserError."""
    file_platform = _read(Path(path).absolute(), path)
    card_name = file_platform.name.rpartition(":")[2]
    require(
        name in (None, card_name),
        f"platform={f'{path}:{name}'!r}: the card in this file is {card_name!r} now, name that or leave the name out",
    )
    return file_platform


def card_of(path: Path) -> tuple[Card, str]:
    """The card without its fitted calibration, which the caller may be about to make, and the diffusion LLM that it runs."""
    try:
        parsed = replace(_card_file(path), calibration=None)
        return _card(path, parsed), parsed.dllm.get("model", _DLLM_MODEL)
    except UserError as error:
        raise UserError(f"platform={str(path)!r}: {error}") from None


@file_cache(maxsize=64)
def _read(path: Path, shown_path: str) -> Platform:
    try:
        parsed = _card_file(path)
        card = _card(path, parsed)
        parts = _dllm(parsed.dllm, card), _ampd(parsed, card), _laps(parsed, card)
    except UserError as error:
        raise UserError(f"platform={shown_path!r}: {error}") from None
    return Platform(
        name=f"{shown_path}:{card.name}",
        title=f"{card.name} {parsed.memory_gb:g} GB ({path.name})",
        executor="roofline",
        gpu=card,
        parts=parts,
        digest=digest_of(repr((card, parts))),
    )


def _card_file(path: Path) -> CardFile:
    require(os.path.lexists(path), "there is no such file: give the path of a card's YAML")
    try:
        content = read_yaml(path)
    except UserError:
        raise
    except unreadable_yaml() as error:
        raise UserError(f"it cannot be read as YAML ({one_line(error)}): correct it") from None
    if not isinstance(content, dict):
        raise UserError(f"it holds {content!r}: write {', '.join(REQUIRED)}, each with its value")
    for name in REQUIRED:
        require(content.get(name) is not None, f"it has no {name}: add it, as the card's datasheet says")
    field_names = [field.name for field in fields(CardFile)]
    for name in content:
        require(name in field_names, f"{name}={content[name]!r} is unknown: use {', '.join(field_names)}")
    sections = {name: checked_section(name, content[name]) for name in SECTIONS if content.get(name) is not None}
    parsed = CardFile(**{name: value for name, value in content.items() if value is not None} | sections)
    require(
        bool(_NAME.fullmatch(parsed.name)),
        f"name={parsed.name!r} is no name of a card: use letters, digits, '-', '.' and '_'",
    )
    require(
        parsed.name.lower() not in _CATALOGUE,
        f"name={parsed.name!r} is a card that is known here: use --platform or --hardware {parsed.name.lower()}, or give another name",
    )
    return parsed


def _card(path: Path, fields: CardFile) -> Card:
    return Card(
        name=fields.name,
        bf16_tflops=float(fields.bf16_tflops),
        memory_bandwidth_gb_s=float(fields.memory_bandwidth_gb_s),
        memory_bytes=round(fields.memory_gb * GB),
        nvlink_gb_s=None if fields.nvlink_gb_s is None else float(fields.nvlink_gb_s),
        pcie_gb_s=float(fields.pcie_gb_s),
        source=fields.source,
        calibration=None if fields.calibration is None else _calibration(path.parent / fields.calibration, fields.name),
        tables=None if fields.kernels is None else load_folder(fields.name, path.parent / fields.kernels),
    )


def _calibration(path: Path, card: str) -> CardCalibration:
    require(not path.is_dir(), f"calibration={str(path)!r} cannot be read (it is a directory): give a file")
    fit = CardCalibration.load(path)
    require(fit.gpu == card, f"calibration={str(path)!r} is of {fit.gpu!r} and the card is {card!r}: fit it again")
    return fit


def _dllm(settings: Mapping[str, Any], card: Gpu) -> DllmPart:
    by_peak = card.bf16_tflops / L40S.bf16_tflops
    options: dict[str, Any] = {
        "model": _DLLM_MODEL,
        "memory_bytes": card.memory_bytes,
        "max_num_logits": 2048,
        "max_num_seqs": 256,
        # Rates of the L40S, whose knees lie among them, scaled by peak: most steps are bound by arithmetic.
        "rates": tuple(float(f"{rate * by_peak:.2g}") for rate in (0.1, 0.25, 0.5, 1.0)),
        "num_requests": dict.fromkeys(("livebench", "burst", "osc"), 128),
        **settings,
    }
    tokens = options.get("max_num_batched_tokens") or _step_tokens(options)
    return DllmPart(**{"max_num_batched_tokens": tokens, "max_model_len": min(4096, tokens), **options})


def _step_tokens(defaults: Mapping[str, Any]) -> int:
    """The largest of 16,384, 8,192 and 4,096 tokens for which memory holds the K/V of two such steps, or 4,096 if none fits."""
    shape = ModelShape.from_config(config_of(defaults["model"]), name=defaults["model"], dtype_bytes=2)
    for tokens in (16384, 8192):
        config = EngineConfig(
            max_num_batched_tokens=tokens,
            max_num_logits=defaults["max_num_logits"],
            max_num_seqs=defaults["max_num_seqs"],
            max_model_len=4096,
        )
        if divide_memory(shape, defaults["memory_bytes"], config, logit_rows=config.logit_rows).kv_rows >= 2 * tokens:
            return tokens
    return 4096


ROOM = 32_768
"""Tokens of K/V that a card must hold beside the weights before we choose a model for it."""


def _check_model(section: str, model: str | None) -> None:
    if model is not None:
        try:
            autoregressive_shape(model, section)
        except UserError as error:
            raise UserError(f"{section}: {error}") from None


def _ampd(fields: CardFile, card: Gpu) -> ArPart:
    """The defaults of AMPD. The model is Llama-3.1-70B if four cards hold it with ``ROOM``, else Qwen3-32B."""
    options, constants = fields.ampd, cost_constants(fields.ampd.get("constants", "physical"))
    _check_model("ampd", options.get("model"))
    large = Hardware(shape=model_shape("Llama-3.1-70B"), gpu=card, constants=constants)
    defaults: dict[str, Any] = {
        "model": "Llama-3.1-70B" if large.kv_capacity(4) >= ROOM else "Qwen3-32B",
        "num_gpus": fields.num_gpus,
        "constants": "physical",
        "rates": (0.8, 1.2, 1.6, 2.0, 2.4),
        "num_sessions": 99,
        "objectives": paper_objectives(),
    }
    return ArPart(**{**defaults, **options})


def _laps(fields: CardFile, card: Gpu) -> PrefillPart:
    """The defaults of LAPS. The model is Qwen2.5-14B if the card holds it with ``ROOM``, else Qwen2.5-7B."""
    options, shape = fields.laps, model_shape("Qwen2.5-14B")
    _check_model("laps", options.get("model"))
    fits = 0.85 * card.memory_bytes - shape.weight_bytes >= ROOM * shape.kv_bytes_per_token
    defaults: dict[str, Any] = {
        "title": f"{card.name} {fields.memory_gb:g} GB, prefill instances",
        "gpu": card,
        "model": "Qwen2.5-14B" if fits else "Qwen2.5-7B",
        "most_instances": fields.num_gpus,
    }
    return replace(platform("h200").part(PrefillPart), **{**defaults, **options})
