"""Holds composed steps against AIConfigurator's estimates, or against a card: python -m repro.bench.silicon peer|card --help

peer    AIConfigurator (NVIDIA, Apache-2.0) composes the steps of vLLM, SGLang and TensorRT-LLM from kernels that it measured. Its
        estimates for our models are in silicon_estimates.csv; --again makes them anew with the package. We compare our composed
        steps with the estimates for the same framework's kernels. Neither includes an overhead per step. The package knows only
        causal models, so a refresh of LLaDA-8B is compared with a prefill of its layers.

card    We simulate again every dLLM run that a card served with all requests at once (results/CARD/runs, of 'repro gpu-suite').
        The simulation has the measured pool or static batch, so both run one schedule. Its steps are priced by the kernels of
        the three frameworks and by datasheet peaks, without an overhead per step.
        steps     measured steps, and those of the simulation
        tokens    of an answer
        in_graphs share of steps that were replayed
        of_card   measured throughput over that of composed steps, by vLLM's kernels
"""

import argparse
import importlib
import importlib.metadata
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from engines.cluster.hardware import DEGREES, PHYSICAL, WorkerCost
from engines.cost.extract import LICENCE, SYSTEMS
from engines.cost.kernels import FRAMEWORKS, Composed, kernels_of
from engines.cost.roofline import StepWork, gpu
from engines.errors import UserError, require
from engines.models.shape import LLADA_8B, SHAPES, ModelShape, model_shape
from engines.policies.views import Chunk
from repro.bench.common import Rows, parser_of, run, table
from repro.families.dllm.deployment import DllmDeployment, sized
from repro.families.platforms import PLATFORMS
from repro.files import replace_text
from repro.gpu_suite.suite import BLOCK, simulated, title_of
from repro.runs.cell import BASIS, Cell
from repro.runs.experiment import prepare
from repro.runs.family import served_per_second
from repro.runs.store import SUFFIX, part_of, parts_of

PACKAGE, VERSION = "aiconfigurator-core", "0.12.0"
ESTIMATES = Path(__file__).with_name("silicon_estimates.csv")
MODELS = tuple(shape.name for shape in SHAPES if shape.name != "Dream-7B")
"""Models to compare. Dream-7B is left out, because it has the layers of Qwen2.5-7B."""
WEIGHTS_SHARE = 0.9
"""A model is compared at the degrees at which its weights fit in this share of the memory."""


class SiliconPoint(NamedTuple):
    card: str
    model: str
    degree: int
    phase: str
    """prefill, decode or refresh."""
    batch: int
    tokens: int
    """New tokens for each sequence."""
    history: int
    """Tokens of each sequence that have K/V already."""


Estimates = dict[SiliconPoint, dict[str, float]]
"""For each point, milliseconds by framework."""


def points_of(card: str, shape: ModelShape) -> Iterator[SiliconPoint]:
    degrees = [n for n in DEGREES if shape.n_heads % n == shape.n_kv_heads % n == 0]
    if shape == LLADA_8B:
        for batch in (1, 8):
            for power in range(5, 13):
                yield SiliconPoint(card, shape.name, 1, "refresh", batch, 2**power, 0)
        return
    for degree in degrees:
        if shape.weight_bytes > WEIGHTS_SHARE * degree * gpu(card).memory_bytes:
            continue
        for history in (0, 4096):
            for power in range(7, 14):
                yield SiliconPoint(card, shape.name, degree, "prefill", 1, 2**power, history)
        for context in (1024, 4096):
            for power in range(9):
                yield SiliconPoint(card, shape.name, degree, "decode", 2**power, 1, context)


# -- their estimates ----------------------------------------------------------------------------------------


def read(path: Path) -> Estimates:
    stored = pd.read_csv(path, comment="#")
    columns = [*SiliconPoint._fields, *FRAMEWORKS]
    require(list(stored) == columns, f"estimates={path}: columns are {list(stored)}: write them with --again")
    size = len(SiliconPoint._fields)
    rows = stored.astype(dict.fromkeys(FRAMEWORKS, float)).itertuples(index=False, name=None)
    return {SiliconPoint(*row[:size]): dict(zip(FRAMEWORKS, row[size:], strict=True)) for row in rows}


def write(path: Path, estimates: Estimates) -> None:
    head = (
        f"# Milliseconds of a step as {PACKAGE} {VERSION} estimates it with three frameworks' kernels, made by "
        f"python -m repro.bench.silicon peer --again.\n# From data under {LICENCE}.\n"
    )
    rows = pd.DataFrame([point._asdict() | times_ms for point, times_ms in estimates.items()])
    replace_text(path, head + rows.to_csv(index=False, float_format="%.4g"))


def make_estimates(points: Iterable[SiliconPoint]) -> Estimates:
    engine = _engine()
    estimates: Estimates = {}
    handles: dict[tuple[str, ...], Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for point in points:
            shape, degree = model_shape(point.model), point.degree
            home = Path(folder, shape.name)
            if not home.exists():
                home.mkdir()
                (home / "config.json").write_text(json.dumps(config_of(shape)), encoding="utf-8")
            sharding = {"moe_tp_size": degree, "moe_ep_size": 1} if shape.num_experts > 1 else {}
            for framework in FRAMEWORKS:
                key = point.card, point.model, str(degree), framework
                if key not in handles:
                    handles[key] = engine.compile(str(home), SYSTEMS[point.card], framework, tp_size=degree, **sharding)
                estimates.setdefault(point, {})[framework] = estimate_ms(handles[key], point)
    return estimates


def _engine() -> Any:
    remedy = "pip install '.[silicon]' (80 MB, Linux x86-64)"
    try:
        module = importlib.import_module("aiconfigurator_core.sdk.engine")
        version = importlib.metadata.version(PACKAGE)
    except ImportError as error:
        raise UserError(f"--again needs {PACKAGE}, which is not installed: {remedy}") from error
    require(version == VERSION, f"--again needs {PACKAGE} {VERSION}, and {version} is installed: {remedy}")
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)  # of tables that none of our models reads
    return module.EngineHandle


def estimate_ms(handle: Any, point: SiliconPoint) -> float:
    """The estimate of a compiled engine. Its prompts include the history, and it decodes the token after them."""
    is_decode = point.phase == "decode"
    prefill_ms, decode_ms, _ = handle.run_static(
        batch_size=point.batch,
        isl=point.history + (0 if is_decode else point.tokens),
        osl=2,
        prefix=0 if is_decode else point.history,
        mode="static_gen" if is_decode else "static_ctx",
    )
    return decode_ms if is_decode else prefill_ms


def config_of(shape: ModelShape) -> dict[str, Any]:
    """The config as the package reads it. It knows families by their architecture: a norm of queries and keys means Qwen3."""
    family = "Llama"
    if shape.num_experts > 1:
        family = "Mixtral"
    elif shape.qk_norm:
        family = "Qwen3"
    elif shape.qkv_bias:
        family = "Qwen2"
    experts = {"num_local_experts": shape.num_experts, "num_experts_per_tok": shape.experts_per_token}
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "hidden_size": shape.d_model,
        "intermediate_size": shape.mlp_hidden,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_rows,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": shape.tied,
        **(experts if shape.num_experts > 1 else {}),
    }


# -- our costs ----------------------------------------------------------------------------------------------


def refresh_work(point: SiliconPoint) -> StepWork:
    """The work of computing all tokens anew. The head gets one row per sequence, as in a prefill."""
    rows = point.batch * point.tokens
    return StepWork(
        query_rows=rows,
        attention_pairs=rows * point.tokens,
        logit_rows=point.batch,
        kv_read_rows=rows,
        kv_written_rows=rows,
        num_sequences=point.batch,
    )


def composed_ms(point: SiliconPoint, framework: str) -> float:
    """Milliseconds of the kernels alone, like the package's estimates."""
    shape, card, degree = model_shape(point.model), gpu(point.card), point.degree
    if point.phase == "refresh":
        price = Composed(kernels_of(shape.on_rank(degree), card, framework, degree))
        return 1e3 * price.step_time(refresh_work(point)).total_s
    cost = WorkerCost(shape, card, degree, replace(PHYSICAL, step_overhead_s=0.0), kernels=framework)
    if point.phase == "decode":
        return 1e3 * cost.step_s([], point.batch, point.batch * point.history)
    return 1e3 * cost.step_s([Chunk(point.history, point.tokens)] * point.batch, 0, 0)


# -- ratios -------------------------------------------------------------------------------------------------


def ratios(estimates: Estimates) -> pd.DataFrame:
    """Ratio of our milliseconds to theirs, with a row for each point and framework."""
    rows = [
        {**point._asdict(), "framework": framework, "ours_ms": composed_ms(point, framework), "theirs_ms": theirs_ms}
        for point, times_ms in estimates.items()
        for framework, theirs_ms in times_ms.items()
    ]
    return pd.DataFrame(rows).assign(ratio=lambda found: found.ours_ms / found.theirs_ms)


def summary_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Median and extremes of the ratios for each card and phase."""
    rows = []
    for (card, phase), members in frame.groupby(["card", "phase"], sort=False):
        ratio, distance = members.ratio, (members.ratio - 1).abs()
        low, high = members.loc[ratio.idxmin()], members.loc[ratio.idxmax()]
        rows.append(
            {
                "card": card,
                "phase": phase,
                "points": len(members),
                "median": ratio.median(),
                "off": distance.median(),
                "beyond": int((distance > 0.2).sum()),
                "lowest": low.ratio,
                "lowest_at": _point_text(low),
                "highest": high.ratio,
                "highest_at": _point_text(high),
            }
        )
    return rows


def _point_text(row: pd.Series) -> str:
    """A point as one word: model, framework, degree, batch x tokens over history."""
    work = f"{row.batch}x{row.history}" if row.phase == "decode" else f"{row.batch}x{row.tokens}+{row.history}"
    return f"{row.model}/{row.framework}/tp{row.degree}/{work}"


# -- a card's own runs --------------------------------------------------------------------------------------


def row_of(parts: Mapping[str, bytes]) -> dict[str, Any] | None:
    """The run's row; None unless the run is valid, served a load, and was not profiled."""
    cell = Cell.from_written(part_of(parts, "cell")).without(BASIS)
    manifest, summary = part_of(parts, "manifest"), part_of(parts, "summary")
    if cell.figure != "saturation" or not manifest["validity"]["valid"] or "profile_every" in cell.knob_values:
        return None
    facts, measured = manifest["facts"], summary["throughput_tok_s"]
    if cell.system == BLOCK:
        return block_row_of(cell, facts, measured, len(part_of(parts, "steps")["step"]))
    graph = part_of(parts, "steps")["graph"]
    return _row(
        cell,
        facts,
        measured,
        lambda **charged: simulate_again(replace(cell, knobs=(*cell.knobs, *charged.items())), facts["facts"]),
        memory_gb=facts["facts"]["enforced_memory_bytes"] / 1e9,
        steps=len(graph),
        in_graphs=sum(map(bool, graph)) / len(graph),
    )


def block_row_of(cell: Cell, facts: Mapping[str, Any], measured: float, steps: int) -> dict[str, Any] | None:
    """The row of a block-diffusion run, on the platform of its card and model; None if there is no such platform."""
    platform = f"{cell.platform}-{facts['model']}"
    if platform not in PLATFORMS:
        return None
    shared = {name: value for name, value in cell.knob_values.items() if name not in ("model", "device", "dtype")}
    knobs = {**shared, "num_tokens": facts["num_tokens"]}

    def charged_by(**charged: str) -> Any:
        simulated_cell = replace(cell, platform=platform, executor="roofline", knobs=(*knobs.items(), *charged.items()))
        return prepare(simulated_cell).run()

    memory_gb = gpu(cell.platform).memory_bytes / 1e9
    return _row(cell, facts, measured, charged_by, memory_gb=memory_gb, steps=steps, in_graphs=0.0)


def _row(
    cell: Cell,
    facts: Mapping[str, Any],
    measured: float,
    charged_by: Callable[..., Any],
    *,
    memory_gb: float,
    steps: int,
    in_graphs: float,
) -> dict[str, Any]:
    """A row with a card's run and simulated ones. ``charged_by`` runs the cell again with knobs that set the cost of its steps."""
    records = {framework: charged_by(kernels=framework) for framework in FRAMEWORKS}
    speeds = {framework: speed_of(record) for framework, record in records.items()}
    return dict(
        model=facts["model"],
        memory_gb=memory_gb,
        system=title_of(cell),
        requests=facts["dataset"]["lengths"]["n"],
        tokens=int(str(cell.knob_values["gen_length"])),
        steps=steps,
        simulated_steps=len(records["vllm"].tables["steps"]["step"]),
        in_graphs=in_graphs,
        measured_tok_s=measured,
        **{f"{framework}_tok_s": speed for framework, speed in speeds.items()},
        datasheet_tok_s=speed_of(charged_by(cost="roofline")),
        of_card=measured / speeds["vllm"],
    )


def speed_of(record: Any) -> float:
    """Tokens per second."""
    speed = served_per_second(record, "output_len")
    assert speed is not None, "a simulated run serves something"
    return speed


def simulate_again(cell: Cell, facts: Mapping[str, Any]) -> Any:
    """The record of the simulated cell, with the measured pool or batch."""
    experiment = simulated(cell)
    deployment = experiment.deployment
    assert isinstance(deployment, DllmDeployment)
    if "kv_rows" in facts:
        deployment = replace(deployment, kv_rows=facts["kv_rows"])
    else:
        deployment = sized(deployment, {**deployment.facts, "batch_size": facts["batch_size"]})
    return replace(experiment, deployment=deployment).run()


# -- the two commands ---------------------------------------------------------------------------------------


def main() -> None:
    options = _options()
    (compare_with_peer if options.against == "peer" else compare_with_card)(options)


def compare_with_peer(options: argparse.Namespace) -> None:
    if options.again:
        points = (point for card in SYSTEMS for name in MODELS for point in points_of(card, model_shape(name)))
        write(ESTIMATES, make_estimates(points))
    frame = ratios(read(ESTIMATES))
    print(table(summary_rows(frame)))
    rows = Rows(options.json, {"package": PACKAGE, "version": VERSION})
    rows.rows = frame.to_dict("records")
    rows.save()


def compare_with_card(options: argparse.Namespace) -> None:
    rows = Rows(options.json)
    for file in sorted(options.runs.glob(f"*{SUFFIX}")):
        row = row_of(parts_of(file.read_bytes()))
        if row is not None:
            rows.add(row)
            print(f"{row['system']}, {row['requests']} requests", file=sys.stderr)
    if not rows.rows:
        raise UserError(f"runs={str(options.runs)!r} holds no valid run of a load: give results/CARD/runs of a card")
    rows.rows.sort(key=lambda row: (row["model"], -row["memory_gb"], -row["requests"], -row["measured_tok_s"]))
    print(table(rows.rows))
    if options.csv:
        pd.DataFrame(rows.rows).to_csv(options.csv, index=False, float_format="%.4g")


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="against", required=True)
    peer = commands.add_parser("peer", help="AIConfigurator's own estimates")
    peer.add_argument("--again", action="store_true", help=f"make the estimates with {PACKAGE} {VERSION}, a minute")
    card = commands.add_parser("card", help="what a card served")
    card.add_argument("runs", type=Path, help="folder of a card's runs, such as results/h200/runs")
    card.add_argument("--csv", type=Path, help="write the rows here as a table")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
