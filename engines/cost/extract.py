"""Takes the kernel times of models out of the package that publishes them (``aiconfigurator-core``, Apache-2.0).

We take what the models here need, and all that is listed. Other products and heads follow from the listed ones (``engines.cost.listed``).
"""

import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engines.cost import kernels
from engines.cost.listed import Curve, between, product_curve
from engines.cost.roofline import gpu
from engines.errors import UserError, require
from engines.models.shape import BLOCK_DIFFUSION, SHAPES, ModelShape

if TYPE_CHECKING:
    import pandas as pd

PACKAGE = "aiconfigurator_core"
LICENCE = "Apache-2.0, Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES"
SYSTEMS: Mapping[str, str] = {
    "l40s": "l40s",
    "a100": "a100_sxm",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
}
"""The package's names for our cards."""
L2_BYTES: Mapping[str, float] = {"l40s": 96e6, "a100": 40e6, "h100": 50e6, "h200": 50e6, "b200": 126e6}
"""Second-level cache, from NVIDIA's whitepapers of each architecture."""
ROUTING = "power_law_1.2"
"""How tokens spread over experts, in the tables that all frameworks have: some experts get more tokens than others."""

Floats = npt.NDArray[np.float64]

SPIKE = 1.2
"""A time is a spike if it is so many times longer than both of its neighbours."""
LARGE_WEIGHTS = 8
"""We read memory's speed from products whose weights are so many times the L2 cache."""
FEW_ROWS = 8
"""Up to so many rows, products of large weights are bound by memory on every card, and move little else."""

Found = dict[tuple[int, ...], Curve]
"""Curves of a kernel."""


@dataclass
class Extract:
    """The curves of one card, and what we read and changed on the way."""

    card: str
    root: Path
    curves: dict[tuple[str, kernels.Kernel], Found] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    rules: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def about(self) -> dict[str, Any]:
        return {
            "card": self.card,
            "package": PACKAGE.replace("_", "-"),
            "version": version(PACKAGE.replace("_", "-")),
            "system": SYSTEMS[self.card],
            "licence": LICENCE,
            "files": self.files,
            "rules": self.rules,
        }

    def read(self, operation: str, framework: str, name: str) -> "pd.DataFrame":
        """The newest table of a framework, but none newer than its newest attention table: every complete release has one."""
        import pandas as pd

        system = self.root / SYSTEMS[self.card]
        newest = max((_release(path.name) for path in (system / "attention" / framework).glob("*")), default=())
        tables = (system / operation / framework).glob(f"*/{name}_perf.parquet")
        releases = sorted((_release(path.parent.name), path) for path in tables)
        releases = [each for each in releases if each[0] <= newest]
        require(bool(releases), f"card={self.card!r}: {PACKAGE} has no {name} table of {framework} for it")
        path = releases[-1][1]
        self.files[str(path.relative_to(self.root))] = hashlib.sha256(path.read_bytes()).hexdigest()
        return pd.read_parquet(path)


def extracts(card: str, degrees: Sequence[int]) -> dict[Path, Extract]:
    """Extracts of a card by the folder of their file: models here at the ``degrees``, block-diffusion models on one of some cards, and
    all that is listed."""
    block = {kernels.BLOCK_FOLDER: extract(card, (1,), TABLED)} if card in BLOCK_CARDS else {}
    by_folder = {kernels.FOLDER: extract(card, degrees), **block, kernels.LISTED_FOLDER: extract_listed(card)}
    fp8 = extract_fp8(card)
    return by_folder | ({kernels.FP8_FOLDER: fp8} if fp8.curves else {})


BLOCK_CARDS = ("h100", "h200")
TABLED = tuple(shape for shape in BLOCK_DIFFUSION if shape.name != "LLaDA2-flash")
"""Block-diffusion models whose experts are in the tables."""


def extract(card: str, degrees: Sequence[int], shapes: Sequence[ModelShape] = SHAPES) -> Extract:
    """Every curve, for each framework, that ``shapes`` need on ``card`` at the tensor-parallel ``degrees`` that divide their heads."""
    tables = _open_extract(card)
    ranks = [
        (degree, shape.on_rank(degree))
        for shape in shapes
        for degree in degrees
        if shape.n_heads % degree == shape.n_kv_heads % degree == 0
    ]
    products = {
        product
        for _, rank in ranks
        for product in (*kernels.layer_products(rank), *kernels.dense_layer_products(rank), kernels.head_product(rank))
    }
    for framework in kernels.FRAMEWORKS:
        curves = _products(tables, framework)
        tables.curves[framework, "gemm"] = {
            tuple(product): product_curve(product, curves, gpu(card)) for product in products
        }
        for kernel in ("prompt", "decode"):
            curves = _attention(tables, framework, kernel)
            tables.curves[framework, kernel] = {
                (*heads, int(batch)): curve
                for heads in {kernels.heads_of(rank) for _, rank in ranks}
                for batch, curve in between(*heads, curves, by_ratio=False).items()
            }
        experts, our_experts = _experts(tables, framework), tables.curves.setdefault((framework, "experts"), {})
        for degree, rank in ranks:
            if (expert_key := kernels.experts_of(rank)) is not None:
                require((*expert_key, degree) in experts, f"{PACKAGE} has no {expert_key} of {framework} for {card}")
                our_experts[tuple(expert_key)] = experts[*expert_key, degree]
        _all_reduces(tables, framework)
    return tables


def extract_listed(card: str) -> Extract:
    """Every bfloat16 curve that the package lists, for each framework."""
    tables = _open_extract(card)
    for framework in kernels.FRAMEWORKS:
        tables.curves[framework, "gemm"] = _products(tables, framework)
        for kernel in ("prompt", "decode", "prompt-64", "decode-64"):
            tables.curves[framework, kernel] = _attention(tables, framework, kernel)
        tables.curves[framework, "experts"] = _by_rank(_experts(tables, framework))
        _all_reduces(tables, framework)
    return tables


_FP8: Mapping[str, tuple[kernels.Kernel, kernels.Kernel]] = {
    "fp8": ("gemm-fp8", "experts-fp8"),
    "fp8_block": ("gemm-fp8-block", "experts-fp8-block"),
}
"""Kernels of products and of experts, by the package's name of their data type."""


def extract_fp8(card: str) -> Extract:
    """Products and experts in FP8, for each framework that has them on the card."""
    tables = _open_extract(card)
    for framework in kernels.FRAMEWORKS:
        for dtype, (gemm, experts) in _FP8.items():
            groups = _products(tables, framework, dtype), _by_rank(_experts(tables, framework, dtype))
            tables.curves |= {
                (framework, kernel): curves for kernel, curves in zip((gemm, experts), groups, strict=True) if curves
            }
    return tables


def _by_rank(experts: Found) -> Found:
    """Curves by what a rank holds. If several degrees give a rank the same experts, the least degree counts."""
    by_rank: Found = {}
    for (*key, _), curve in sorted(experts.items(), key=lambda each: each[0][-1]):
        by_rank.setdefault(tuple(key), curve)
    return by_rank


def _open_extract(card: str) -> Extract:
    require(card in SYSTEMS, f"silicon={card!r} has no tables in {PACKAGE}: use one of {', '.join(SYSTEMS)}")
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"silicon needs the package {PACKAGE}: pip install '.[silicon]' (80 MB, Linux x86-64)")
    return Extract(card=card, root=Path(spec.submodule_search_locations[0]) / "systems" / "data")


def _release(name: str) -> tuple[int, ...]:
    """A key by which 1.3.0rc20 comes after 1.3.0rc15."""
    return tuple(int(part) for part in name.replace("rc", ".").replace("post", ".").split(".") if part.isdigit())


def _products(source: Extract, framework: str, dtype: str = "bfloat16") -> Found:
    """All listed products, after the rules."""
    table = source.read("gemm", framework, "gemm")
    table = table[table.gemm_dtype == dtype]
    if table.empty:
        return {}
    table = table.groupby(["n", "k", "m"]).latency.median().unstack("m") / 1e3
    outputs, inputs = (table.index.get_level_values(name).to_numpy(float) for name in ("n", "k"))
    rows = table.columns.to_numpy(float)
    seconds = table.to_numpy(float)
    spiky = spikes(seconds)
    times = fill_gaps(rows, seconds, spiky | np.isnan(seconds))
    card = gpu(source.card)
    size_bytes = 2 if dtype == "bfloat16" else 1
    weights = size_bytes * outputs * inputs
    num_bytes = weights[:, None] + rows * (2 * outputs + size_bytes * inputs)[:, None]
    clean = streamed(times, num_bytes, rows, weights, bandwidth=card.bandwidth, cache=L2_BYTES[source.card])
    source.rules[framework if dtype == "bfloat16" else f"{framework} {dtype}"] = {
        "products": int(seconds.size),
        "spikes": int(spiky.sum()),
        "faster_than_memory": int(clean.impossible.sum()),
        "raised_to_streamed": int(clean.raised.sum()),
        "streamed_share": round(clean.bandwidth / card.bandwidth, 4),
    }
    sizes = tuple(rows.tolist())
    keys = zip(outputs.tolist(), inputs.tolist(), strict=True)
    return {(int(n), int(k)): (sizes, tuple(curve.tolist())) for (n, k), curve in zip(keys, clean.times, strict=True)}


def _attention(source: Extract, framework: str, kernel: kernels.Kernel) -> Found:
    """All listed heads of a width, after the rules."""
    is_prompt, width = kernel.startswith("prompt"), 64 if kernel.endswith("-64") else 128
    table = source.read("attention", framework, "context_attention" if is_prompt else "generation_attention")
    mask = (table.head_dim == width) & (table.kv_cache_dtype == "bfloat16") & (table.attn_dtype == "bfloat16")
    if "window_size" in table:
        mask &= table.window_size == 0
    table = table[mask]
    # A decode's context holds the token that it is given, besides the tokens before.
    table = table.assign(tokens=table.isl if is_prompt else table.isl + table.step)
    times = (
        table.groupby(["num_heads", "num_key_value_heads", "batch_size", "tokens"]).latency.median().unstack("tokens")
        / 1e3
    )
    sizes = times.columns.to_numpy(float)
    clean = times.to_numpy(float)
    spiky = spikes(clean)
    heads, kv_heads, batch = (times.index.get_level_values(level).to_numpy(float)[:, None] for level in range(3))
    # Queries and outputs of every token of a prompt, or of a decode's one token; keys and values of all tokens.
    num_bytes = 2 * batch * width * (2 * heads * (sizes if is_prompt else 1) + 2 * kv_heads * sizes)
    least_s = num_bytes / gpu(source.card).bandwidth
    source.rules[framework] |= {
        f"{kernel}_spikes": int(spiky.sum()),
        f"{kernel}_faster_than_memory": int((clean < least_s).sum()),
    }
    clean = np.maximum(fill_gaps(sizes, clean, spiky), least_s)
    curves: Found = {}
    for key, row in zip(times.index, clean, strict=True):
        has_time = ~np.isnan(row)
        if has_time.any():
            curves[tuple(map(int, key))] = tuple(sizes[has_time].tolist()), tuple(row[has_time].tolist())
    return curves


def _experts(source: Extract, framework: str, dtype: str = "bfloat16") -> Found:
    """Curves of experts, by their keys and the degree at which each was measured."""
    table = source.read("moe", framework, "moe")
    mask = (table.moe_dtype == dtype) & (table.distribution == ROUTING) & (table.moe_ep_size == 1)
    curves: Found = {}
    columns = ["hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size"]
    for key, group in table[mask].groupby(columns):
        width, hidden, num_chosen, num_experts, degree = map(int, key)
        times = group.groupby("num_tokens").latency.median() / 1e3
        if hidden % degree == 0:
            curves[width, hidden // degree, num_chosen, num_experts, degree] = (
                tuple(times.index.to_numpy(float).tolist()),
                tuple(times.tolist()),
            )
    return curves


def _all_reduces(source: Extract, framework: str) -> None:
    table = source.read("comm", framework, "custom_allreduce")
    if "backend" in table:
        table = table[table.backend.str.endswith("graph")]
    curves = source.curves[framework, "all-reduce"] = {}
    for degree, group in table.groupby("num_gpus"):
        times = group.groupby("message_size").latency.median() / 1e3
        curves[(int(degree),)] = tuple(times.index.to_numpy(float).tolist()), tuple(times.tolist())


def spikes(times: Floats) -> npt.NDArray[np.bool_]:
    """Whether each of ``times``, [..., points] along a growing size, is more than ``SPIKE`` times both of its neighbours.

    Steps are no spikes: after a full tile (257 rows against 256) the next size is as slow. Dips, which full tiles cause, both ends, and
    two long times side by side are none either.
    """
    is_spike = np.zeros(times.shape, dtype=np.bool_)
    before, middle, after = times[..., :-2], times[..., 1:-1], times[..., 2:]
    is_spike[..., 1:-1] = middle > SPIKE * np.maximum(before, after)
    return is_spike


def fill_gaps(sizes: Floats, times: Floats, dropped: npt.NDArray[np.bool_]) -> Floats:
    """Return ``times``, [curves, points], with the ``dropped`` ones put on the line between the times that stay beside them."""
    result = times.copy()
    for curve in np.flatnonzero(dropped.any(axis=-1)):
        valid = ~dropped[curve] & ~np.isnan(times[curve])
        result[curve, dropped[curve]] = np.interp(sizes[dropped[curve]], sizes[valid], times[curve, valid])
    return result


_REACHED = 95
"""Percentile of the bytes per second that large products move. We do not take the most, as a single time may still be too short."""


class Streamed(NamedTuple):
    times: Floats
    """[products, rows], none below the time that memory takes for the product's bytes."""
    bandwidth: float
    """Bytes per second that the largest products reach."""
    raised: npt.NDArray[np.bool_]
    impossible: npt.NDArray[np.bool_]
    """Whether a time was faster than the datasheet's memory allows: its weights had stayed in the L2 cache between repetitions."""


def streamed(
    times: Floats, num_bytes: Floats, rows: Floats, weights: Floats, *, bandwidth: float, cache: float
) -> Streamed:
    """Raise times that are faster than memory can deliver the bytes, at the rate that large products reach.

    ``times`` and ``num_bytes`` are [products, rows], ``weights`` bytes by product, ``bandwidth`` the datasheet's in bytes per
    second and ``cache`` the bytes of the L2. A product that is timed over and over finds its weights in the cache. In a
    forward, other layers have used the cache since.
    """
    large_s = times[weights >= LARGE_WEIGHTS * cache][:, rows <= FEW_ROWS]
    large_bytes = num_bytes[weights >= LARGE_WEIGHTS * cache][:, rows <= FEW_ROWS]
    rate = min(bandwidth, float(np.nanpercentile(large_bytes / large_s, _REACHED)))
    least_s = num_bytes / rate
    is_raised = times < least_s
    return Streamed(np.where(is_raised, least_s, times), rate, is_raised, times < num_bytes / bandwidth)
