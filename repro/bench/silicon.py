"""Holds composed steps against AIConfigurator's estimates, or against a card: python -m repro.bench.silicon peer|card --help

peer    AIConfigurator (NVIDIA, Apache-2.0) composes the steps of vLLM, SGLang and TensorRT-LLM of kernels that it measured. Its
        estimates for our models are in silicon_estimates.csv; --again makes them anew with the package. Composed steps are held
        against the estimates with the same framework's kernels. Neither hold an overhead of a step. The package knows causal
        models alone: a refresh of LLaDA-8B is held against a prefill of its layers.

card    Every dLLM run that a card has served with all requests there at once (results/CARD/runs, of 'repro gpu-suite') is
        simulated again with the pool, or the static batch, that was measured, so that both run one schedule. Its steps are charged
        by the kernels of the three frameworks and by datasheet peaks, without an overhead of a step.
        steps     measured, and simulated where they differ
        of card   measured throughput over that of composed steps, by vLLM's kernels
"""

import argparse
import csv
import importlib
import importlib.metadata
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from engines.cluster.hardware import DEGREES, PHYSICAL, WorkerCost
from engines.cost.extract import LICENCE, SYSTEMS
from engines.cost.kernels import FRAMEWORKS, Composed, kernels_of
from engines.cost.roofline import StepWork, gpu
from engines.errors import UserError, require
from engines.models.shape import LLADA_8B, SHAPES, ModelShape, model_shape
from engines.policies.views import Chunk
from repro.bench.common import Rows, parser_of, run, shown, table, write_csv
from repro.gpu_suite.expected import simulated
from repro.gpu_suite.stages import BLOCK, title_of
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.runs.family import served_per_second
from repro.runs.store import SUFFIX, part_of, parts_of
from repro.systems.dllm.deployment import DllmDeployment, sized
from repro.systems.platforms import PLATFORMS

PACKAGE, VERSION = "aiconfigurator-core", "0.12.0"
ESTIMATES = Path(__file__).with_name("silicon_estimates.csv")
MODELS = tuple(shape.name for shape in SHAPES if shape.name != "Dream-7B")
"""Dream-7B has the layers of Qwen2.5-7B."""
WEIGHTS_SHARE = 0.9
"""A model is held at degrees at which its weights fit in so much of the memory."""


class Point(NamedTuple):
    card: str
    model: str
    degree: int
    phase: str
    """prefill, decode or refresh."""
    batch: int
    tokens: int
    """New tokens of each sequence."""
    history: int
    """Tokens of each sequence whose K/V exist."""


Estimates = dict[Point, dict[str, float]]
"""Milliseconds by framework."""


def points_of(card: str, shape: ModelShape) -> Iterator[Point]:
    degrees = [n for n in DEGREES if shape.n_heads % n == shape.n_kv_heads % n == 0]
    if shape == LLADA_8B:
        for batch in (1, 8):
            for power in range(5, 13):
                yield Point(card, shape.name, 1, "refresh", batch, 2**power, 0)
        return
    for degree in degrees:
        if shape.weight_bytes > WEIGHTS_SHARE * degree * gpu(card).memory_bytes:
            continue
        for history in (0, 4096):
            for power in range(7, 14):
                yield Point(card, shape.name, degree, "prefill", 1, 2**power, history)
        for context in (1024, 4096):
            for power in range(9):
                yield Point(card, shape.name, degree, "decode", 2**power, 1, context)


# -- their estimates ----------------------------------------------------------------------------------------


def read(path: Path) -> Estimates:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(line for line in file if not line.startswith("#")))
    require(
        rows[0] == [*Point._fields, *FRAMEWORKS], f"estimates={path}: columns are {rows[0]}: write them with --again"
    )
    found = {}
    for card, model, degree, phase, batch, tokens, history, *times in rows[1:]:
        point = Point(card, model, int(degree), phase, int(batch), int(tokens), int(history))
        found[point] = {str(name): float(ms) for name, ms in zip(FRAMEWORKS, times, strict=True)}
    return found


def write(path: Path, estimates: Estimates) -> None:
    """Whole or not at all."""
    temporary = path.with_suffix(".partial")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        file.write(
            f"# Milliseconds of a step as {PACKAGE} {VERSION} estimates it with three frameworks' kernels, made by "
            f"python -m repro.bench.silicon peer --again.\n# From data under {LICENCE}.\n"
        )
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow([*Point._fields, *FRAMEWORKS])
        rows.writerows([*point, *(f"{times[name]:.4g}" for name in FRAMEWORKS)] for point, times in estimates.items())
    temporary.rename(path)


def made_again(points: Iterable[Point]) -> Estimates:
    engine = _engine()
    found: Estimates = {}
    handles: dict[tuple[str, ...], Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for point in points:
            shape, degree = model_shape(point.model), point.degree
            home = Path(folder, shape.name)
            if not home.exists():
                home.mkdir()
                (home / "config.json").write_text(json.dumps(config_of(shape)), encoding="utf-8")
            split = {"moe_tp_size": degree, "moe_ep_size": 1} if shape.num_experts > 1 else {}
            for framework in FRAMEWORKS:
                key = point.card, point.model, str(degree), framework
                if key not in handles:
                    handles[key] = engine.compile(str(home), SYSTEMS[point.card], framework, tp_size=degree, **split)
                found.setdefault(point, {})[framework] = estimate_ms(handles[key], point)
    return found


def _engine() -> Any:
    remedy = "pip install '.[silicon]' (80 MB, Linux x86-64)"
    try:
        module = importlib.import_module("aiconfigurator_core.sdk.engine")
        found = importlib.metadata.version(PACKAGE)
    except ImportError as error:
        raise UserError(f"--again needs {PACKAGE}, which is not installed: {remedy}") from error
    require(found == VERSION, f"--again needs {PACKAGE} {VERSION}, and {found} is installed: {remedy}")
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)  # of tables that none of our models reads
    return module.EngineHandle


def estimate_ms(handle: Any, point: Point) -> float:
    """A compiled engine's estimate; its prompts hold the history, and it decodes the token behind them."""
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
    """What the package reads of a checkpoint. It knows families by their architecture: a norm of queries and keys is Qwen3's."""
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


def _step_s(cost: Any, point: Point) -> float:
    if point.phase == "decode":
        return cost.step_s([], point.batch, point.batch * point.history)
    return cost.step_s([Chunk(point.history, point.tokens)] * point.batch, 0, 0)


def refresh_work(point: Point) -> StepWork:
    """All tokens anew, of which the head sees one row a sequence as it does in a prefill."""
    rows = point.batch * point.tokens
    return StepWork(
        query_rows=rows,
        attention_pairs=rows * point.tokens,
        logit_rows=point.batch,
        kv_read_rows=rows,
        kv_written_rows=rows,
        num_sequences=point.batch,
    )


def composed_ms(point: Point, framework: str) -> float:
    """The kernels alone, as their estimates are."""
    shape, card, degree = model_shape(point.model), gpu(point.card), point.degree
    if point.phase == "refresh":
        price = Composed(kernels_of(shape.on_rank(degree), card, framework, degree))
        return 1e3 * price.step_time(refresh_work(point)).total_s
    return 1e3 * _step_s(WorkerCost(shape, card, degree, _NO_OVERHEAD, kernels=framework), point)


_NO_OVERHEAD = replace(PHYSICAL, step_overhead_s=0.0)


# -- ratios -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ratio:
    card: str
    model: str
    degree: int
    phase: str
    batch: int
    tokens: int
    history: int
    framework: str
    ours_ms: float
    theirs_ms: float

    @property
    def ratio(self) -> float:
        return self.ours_ms / self.theirs_ms


@dataclass(frozen=True, kw_only=True)
class Group:
    card: str = shown("card")
    phase: str = shown("phase")
    by: str = shown("by")
    points: int = shown("points")
    median: float = shown("median", ".3f")
    off: float = shown("off %", ".1f", 100)
    """Median distance of a ratio from 1."""
    beyond: int = shown("beyond 20 %")
    lowest: float = shown("lowest", ".3f")
    lowest_at: str = shown("at")
    highest: float = shown("highest", ".3f")
    highest_at: str = shown("at")


def ratios(estimates: Estimates) -> list[Ratio]:
    return [
        Ratio(framework=framework, ours_ms=composed_ms(point, framework), theirs_ms=theirs_ms, **point._asdict())
        for point, times in estimates.items()
        for framework, theirs_ms in times.items()
    ]


def grouped(found: Iterable[Ratio], by: Sequence[str] = ()) -> list[Group]:
    groups: dict[tuple[str, ...], list[Ratio]] = {}
    for each in found:
        groups.setdefault((each.card, each.phase, *(getattr(each, name) for name in by)), []).append(each)
    rows = []
    for (card, phase, *values), members in groups.items():
        values_of = [each.ratio for each in members]
        low, high = (pick(members, key=lambda each: each.ratio) for pick in (min, max))
        rows.append(
            Group(
                card=card,
                phase=phase,
                by=" ".join(map(str, values)) or "all",
                points=len(members),
                median=median(values_of),
                off=median(abs(value - 1) for value in values_of),
                beyond=sum(abs(value - 1) > 0.2 for value in values_of),
                lowest=low.ratio,
                lowest_at=_place(low),
                highest=high.ratio,
                highest_at=_place(high),
            )
        )
    return rows


def _place(one: Ratio) -> str:
    """A point in a word: model, framework, degree, batch x tokens over history."""
    work = f"{one.batch}x{one.history}" if one.phase == "decode" else f"{one.batch}x{one.tokens}+{one.history}"
    return f"{one.model}/{one.framework}/tp{one.degree}/{work}"


# -- a card's own runs --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Served:
    model: str = shown("model")
    memory_gb: float = shown("GB", ".0f")
    system: str = shown("system")
    requests: int = shown("requests")
    tokens: int = shown("tokens")
    """In an answer."""
    steps: int = shown("steps")
    simulated_steps: int = shown("simulated")
    in_graphs: float = shown("in graphs", ".0%")
    """Share of steps that were replayed."""
    measured_tok_s: float = shown("measured", ".1f")
    vllm_tok_s: float = shown("vllm", ".1f")
    sglang_tok_s: float = shown("sglang", ".1f")
    trtllm_tok_s: float = shown("trtllm", ".1f")
    datasheet_tok_s: float = shown("datasheet", ".1f")
    of_card: float = shown("of card", ".2f")


def served_rows(runs: Path) -> Iterator[Served]:
    for file in sorted(runs.glob(f"*{SUFFIX}")):
        row = served(parts_of(file.read_bytes()))
        if row is not None:
            print(f"{row.system}, {row.requests} requests", file=sys.stderr)
            yield row


def served(parts: Mapping[str, bytes]) -> Served | None:
    """The run's row, if it is one of a load, valid and not taken apart."""
    told, manifest, summary = (part_of(parts, name) for name in ("cell", "manifest", "summary"))
    knobs = {name: value for name, value in told["knobs"].items() if name != "basis"}
    if told["figure"] != "saturation" or not manifest["validity"]["valid"] or "profile_every" in knobs:
        return None
    cell = Cell(**{**told, "knobs": tuple(knobs.items())})
    facts, measured = manifest["facts"], summary["throughput_tok_s"]
    if cell.system == BLOCK:
        return served_blocks(cell, facts, measured, len(part_of(parts, "steps")["step"]))
    graph = part_of(parts, "steps")["graph"]
    return _row(
        cell,
        facts,
        measured,
        lambda **charged: again(replace(cell, knobs=(*cell.knobs, *charged.items())), facts["facts"]),
        memory_gb=facts["facts"]["enforced_memory_bytes"] / 1e9,
        steps=len(graph),
        in_graphs=sum(map(bool, graph)) / len(graph),
    )


def served_blocks(cell: Cell, facts: Mapping[str, Any], measured: float, steps: int) -> Served | None:
    """The row of a block diffusion run, on the platform of its card and model; None where there is none."""
    where = f"{cell.platform}-{facts['model']}"
    if where not in PLATFORMS:
        return None
    own = {name: value for name, value in cell.knob_values.items() if name not in ("model", "device", "dtype")}
    knobs = {**own, "num_tokens": facts["num_tokens"]}

    def charged_by(**charged: str) -> Any:
        asked = replace(cell, platform=where, executor="roofline", knobs=(*knobs.items(), *charged.items()))
        return prepare(asked).run()

    memory_gb = gpu(cell.platform).memory_bytes / 1e9
    return _row(cell, facts, measured, charged_by, memory_gb=memory_gb, steps=steps, in_graphs=0.0)


def _row(cell: Cell, facts: Mapping[str, Any], measured: float, charged_by: Callable[..., Any], **own: Any) -> Served:
    """``charged_by`` runs the cell again with knobs that say what its steps cost."""
    records = {each: charged_by(kernels=each) for each in FRAMEWORKS}
    speeds = {each: speed_of(record) for each, record in records.items()}
    columns: dict[str, Any] = {f"{each}_tok_s": speed for each, speed in speeds.items()}
    return Served(
        model=facts["model"],
        system=title_of(cell),
        requests=facts["dataset"]["lengths"]["n"],
        tokens=int(str(cell.knob_values["gen_length"])),
        simulated_steps=len(records["vllm"].tables["steps"]["step"]),
        measured_tok_s=measured,
        **columns,
        datasheet_tok_s=speed_of(charged_by(cost="roofline")),
        of_card=measured / speeds["vllm"],
        **own,
    )


def speed_of(record: Any) -> float:
    """Tokens a second."""
    speed = served_per_second(record, "output_len")
    assert speed is not None, "a simulated run serves something"
    return speed


def again(cell: Cell, facts: Mapping[str, Any]) -> Any:
    """The record of the simulated cell, with the pool that was measured."""
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
    (hold_against_peer if options.against == "peer" else hold_against_card)(options)


def hold_against_peer(options: argparse.Namespace) -> None:
    asked = {point for card in options.cards for name in options.models for point in points_of(card, model_shape(name))}
    if options.again:
        # In the order of the file.
        every = (p for card in SYSTEMS for name in MODELS for p in points_of(card, model_shape(name)) if p in asked)
        estimates = made_again(every)
        write(options.estimates, estimates)
    else:
        estimates = {point: times for point, times in read(options.estimates).items() if point in asked}
    require(bool(estimates), f"estimates={options.estimates} hold none of these cards and models: add --again")
    found = ratios(estimates)
    print(table(grouped(found, options.by)))
    rows = Rows(options.json, {"package": PACKAGE, "version": VERSION})
    rows.rows = [{**vars(each), "ratio": each.ratio} for each in found]
    rows.save()


def hold_against_card(options: argparse.Namespace) -> None:
    rows = Rows(options.json)
    for row in served_rows(options.runs):
        rows.add(row)
    if not rows.rows:
        raise UserError(f"runs={str(options.runs)!r} holds no valid run of a load: give results/CARD/runs of a card")
    rows.rows.sort(key=lambda row: (row.model, -row.memory_gb, -row.requests, -row.measured_tok_s))
    print(table(rows.rows))
    if options.csv:
        write_csv(options.csv, rows.rows)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="against", required=True)
    peer = commands.add_parser("peer", help="AIConfigurator's own estimates")
    peer.add_argument("--cards", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    peer.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    columns = ("model", "degree", "batch", "tokens", "history", "framework")
    peer.add_argument("--by", nargs="+", default=[], choices=columns, help="a line for each, besides card and phase")
    peer.add_argument("--estimates", type=Path, default=ESTIMATES, help="the file read, or written by --again")
    peer.add_argument("--again", action="store_true", help=f"make the estimates with {PACKAGE} {VERSION}, a minute")
    card = commands.add_parser("card", help="what a card served")
    card.add_argument("runs", type=Path, help="folder of a card's runs, such as results/h200/runs")
    card.add_argument("--csv", type=Path, help="write the rows here as a table")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
