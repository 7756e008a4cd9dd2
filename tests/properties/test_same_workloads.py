"""Workloads of every data set, family and file format: the checksums of their requests stored in ``workloads.json``.

A changed checksum means that stored runs were made of other requests. One that is meant to change is stored anew by
``python tests/properties/test_same_workloads.py``.
"""

import gzip
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from support.cells import a_cell
from support.own import Dialogues

from engines.dllm.config import GenerationConfig
from engines.errors import UserError
from engines.models.checkpoint import TINY_DIR
from engines.models.tokenizer import load_tokenizer
from repro.families.cluster.laps_settings import PrefillWorkloadConfig, Stream, draw_workload
from repro.families.http.endpoint import Endpoint
from repro.families.http.requests import HttpKnobs
from repro.families.http.requests import workload_of as http_workload
from repro.runs.experiment import prepare
from repro.workloads.card import Origin, checksum
from repro.workloads.conversations import ConversationConfig, draw_conversations, known_conversation_cards
from repro.workloads.dataset import known_datasets
from repro.workloads.draws import ArrivalConfig
from repro.workloads.knobs import TraceKnobs
from repro.workloads.rounds import TraceFile
from repro.workloads.served import Traced, trace_of, trace_source
from repro.workloads.sessions import SessionWorkloadConfig, build_sessions, known_session_cards
from repro.workloads.workload import WorkloadConfig, build_workload, fixed_workload, traced_workload

STORED = Path(__file__).with_name("workloads.json")
SEEDS = (0, 7)
ARRIVALS = (
    ArrivalConfig(kind="poisson", rate=2.0),
    ArrivalConfig(kind="gamma", rate=0.5, burstiness=0.4),
    ArrivalConfig(kind="constant", rate=3.0),
    ArrivalConfig(kind="burst"),
)
TRACE = ArrivalConfig(kind="trace")
GENERATION = GenerationConfig(gen_length=64, block_length=32, steps=64)
encode = load_tokenizer(TINY_DIR).encode

Sums = Iterator[tuple[str, str]]
"""Names of workloads with their checksums."""


FILES = Path(__file__).with_name("workload_files")
"""A small file of each format, as a workload's file; in ``datasets`` those that a data set or a trace alone is read of."""
DATASET_FILES: Mapping[str, tuple[str, ...]] = {
    "burst": (
        *("azure.csv", "burstgpt.csv", "mooncake.jsonl", "vidur.csv", "burstgpt-sessions.csv", "bailian.jsonl"),
        "datasets/burstgpt1_first500.csv",
    ),
    "osc": ("servegen.csv", "datasets/own.jsonl", "datasets/tldr_post_lengths.csv"),
    "gsm8k": ("datasets/questions.jsonl",),
    "livebench": ("datasets/turns.jsonl",),
}
SESSION_FILES: Mapping[str, str] = {
    "toolbench": "toolbench_dfsdt_examples.jsonl",
    "hotpotqa": "hotpot_dev_distractor_first100.json",
    "dureader": "dureader2_demo_search_dev.jsonl",
}
"""Files of the traces' formats, which are known by their names on the cards."""


def sum_of(workload: Any) -> str:
    return str(workload.provenance.checksum)


def of_requests() -> Sums:
    for dataset in known_datasets():
        for seed in SEEDS:
            own = {"dataset": dataset, "seed": seed, "source": "embedded"}
            for arrivals in ARRIVALS:
                config = WorkloadConfig(**own, num_requests=60, arrivals=arrivals, max_prompt_len=3000)
                yield f"requests {dataset} {seed} {arrivals.kind}", sum_of(build_workload(config, GENERATION))
            texts = {"length_scale": 0.25, "max_prompt_len": 200}
            for name, said in (("texts", texts), ("fixed", {"fixed_prompt_len": 40, "max_prompt_len": 200})):
                config = WorkloadConfig(**own, num_requests=12, arrivals=ARRIVALS[0], **said)
                yield f"requests {dataset} {seed} {name}", sum_of(build_workload(config, GENERATION, encode=encode))


def of_sessions() -> Sums:
    for trace in known_session_cards():
        for seed in SEEDS:
            for arrivals in ARRIVALS:
                config = SessionWorkloadConfig(trace=trace, num_sessions=40, seed=seed, arrivals=arrivals)
                yield f"sessions {trace} {seed} {arrivals.kind}", sum_of(build_sessions(config))
            for counted in ("per_session", "per_round"):
                config = SessionWorkloadConfig(
                    trace=trace, num_sessions=40, seed=seed, arrivals=ARRIVALS[0], counted=counted, delay_mean_s=0.5
                )
                yield f"sessions {trace} {seed} {counted}", sum_of(build_sessions(config))


def of_conversations() -> Sums:
    for dataset in known_conversation_cards():
        for seed in SEEDS:
            changes: dict[str, dict[str, Any]] = {
                "whole": {},
                "thinking": {"think_s": 0.5, "answer_tokens": 20},
                "short": {"high": 256},
                "long": {"low": 1000, "high": 4000},
            }
            for name, change in changes.items():
                config = ConversationConfig(dataset=dataset, num_turns=90, seed=seed, **change)
                yield f"conversations {dataset} {seed} {name}", sum_of(draw_conversations(config))
            for name, arrivals in (("closed", None), ("open", ARRIVALS[0]), ("gamma", ARRIVALS[1])):
                streams = tuple(
                    Stream(
                        conversations=ConversationConfig(dataset=dataset, num_turns=600, seed=seed, high=high),
                        clients=None if arrivals else 4,
                    )
                    for high in (None, 256)
                )
                drawn = draw_workload(PrefillWorkloadConfig(streams=streams, arrivals=arrivals, length_scale=0.5))
                turns = (turn for each in drawn.arrivals for turn in getattr(each, "turns", ()) or each.sessions)
                yield f"turns {dataset} {seed} {name}", checksum([sum_of(drawn), *map(repr, turns)])


def of_families() -> Sums:
    """Whole runs of each family, as its settings ask for their requests."""
    cells = {
        **dict.fromkeys(known_datasets(), ("dllm-serve", "rtx4090", 4.0)),
        **{f"{dataset}/block": ("block-diffusion", "h200-llada2-mini", 4.0) for dataset in known_datasets()},
        **dict.fromkeys(known_session_cards(), ("ampd", "h20x32", 1.5)),
        **dict.fromkeys(known_conversation_cards(), ("laps", "h200", 55.0)),
    }
    for name, (system, platform, rate) in cells.items():
        for seed in SEEDS:
            dataset = name.partition("/")[0]
            knobs: dict[str, Any] = {
                "num_prompts": 20,
                **({"deployment": "P:TP4x1 D:TP4x1"} if system == "ampd" else {}),
            }
            cell = a_cell(system, dataset, platform, "roofline", rate=rate, seed=seed, **knobs)
            yield f"run of {system} {dataset} {seed}", sum_of(prepare(cell).workload)


def of_http() -> Sums:
    for dataset in (*known_datasets(), *known_session_cards()):
        for seed in SEEDS:
            knobs = HttpKnobs(
                endpoint=Endpoint(url="http://127.0.0.1:1"), num_prompts=6, length_scale=0.05, max_prompt_len=4000
            )
            cell = a_cell("http", dataset, "http", "http", rate=2.0, seed=seed)
            yield f"http {dataset} {seed}", _asked(http_workload(cell, knobs, "m", 8192))


def _asked(workload: Any) -> str:
    return checksum(
        [
            sum_of(workload),
            *(f"{each.session_id}|{each.arrival_s}|{each.seed}|{each.turns}" for each in workload.conversations),
        ]
    )


def of_files() -> Sums:
    for path in FILES.glob("*.*"):
        for length in (None, 25):
            yield from _of_file(path.name, TraceFile(where=str(path), gen_length=length))


def _of_file(name: str, file: Traced) -> Sums:
    name = f"{name} answered" if isinstance(file, TraceFile) and file.gen_length else name
    for seed in SEEDS:
        for arrivals in (ARRIVALS[0], TRACE):
            for kind, make in _families_of(file, arrivals, seed).items():
                with suppress(UserError):
                    yield f"{name} {seed} {arrivals.kind} {kind}", sum_of(make())


def _families_of(file: Traced, arrivals: ArrivalConfig, seed: int) -> dict[str, Callable[[], Any]]:
    """Makes the workload that each family has of a file."""
    num = None if arrivals.kind == "trace" else 5
    requests = partial(traced_workload, file, arrivals, seed, _generation, most=900, num=num)
    sessions = partial(SessionWorkloadConfig, trace="x", seed=seed, file=file)
    turns = partial(ConversationConfig, dataset="x", seed=seed, file=file)
    return {
        "lengths": requests,
        "texts": lambda: requests(encode=encode),
        "sessions": lambda: build_sessions(
            sessions(num_sessions=num or len(trace_of(file, seed).sessions), arrivals=arrivals)
        ),
        "delays": lambda: build_sessions(sessions(num_sessions=2, arrivals=ARRIVALS[3], delay_mean_s=2.0)),
        "conversations": lambda: draw_conversations(turns(num_turns=num or 1, replayed=None if num else arrivals)),
        "band": lambda: draw_conversations(turns(num_turns=4, low=8, high=200)),
    }


def _generation(tokens: int) -> GenerationConfig:
    return GenerationConfig(gen_length=tokens, block_length=tokens, steps=tokens)


def of_dataset_files() -> Sums:
    for dataset, names in DATASET_FILES.items():
        for path in (FILES / name for name in names):
            for seed in SEEDS:
                yield from _of_dataset_file(dataset, path, seed)
    with tempfile.TemporaryDirectory() as folder:
        for trace, name in SESSION_FILES.items():
            path = Path(folder, f"{name}.gz")
            path.write_bytes(gzip.compress((FILES / "datasets" / name).read_bytes(), mtime=0))
            yield from _of_session_file(path, trace)
        path = Path(folder, "sessions.jsonl")
        path.write_text((FILES / "rounds.jsonl").read_text(encoding="utf-8") * 3, encoding="utf-8")
        yield from _of_session_file(path, "gaia")
        path = Path(folder, "chats.jsonl")
        path.write_text((FILES / "chats.jsonl").read_text(encoding="utf-8") * 3, encoding="utf-8")
        for dataset in known_conversation_cards():
            for seed in SEEDS:
                config = ConversationConfig(dataset=dataset, num_turns=30, seed=seed, source="local", path=str(path))
                yield f"chats of {dataset} {seed}", sum_of(draw_conversations(config))


def _of_dataset_file(dataset: str, path: Path, seed: int) -> Sums:
    own = {"dataset": dataset, "source": "local", "dataset_path": str(path)}
    for arrivals in (ARRIVALS[0], TRACE):
        config = WorkloadConfig(**own, num_requests=7, seed=seed, arrivals=arrivals, max_prompt_len=700)
        for kind, encoding in (("lengths", None), ("texts", encode)):
            with suppress(UserError):
                made = build_workload(config, GENERATION, encode=encoding)
                yield f"{path.name} of {dataset} {seed} {arrivals.kind} {kind}", sum_of(made)


def _of_session_file(path: Path, trace: str) -> Sums:
    own = {"trace": trace, "source": "local", "trace_path": str(path)}
    for seed in SEEDS:
        for meets in (True, False):
            config = SessionWorkloadConfig(**own, num_sessions=5, seed=seed, arrivals=ARRIVALS[0], meets_totals=meets)
            yield f"{path.name} of {trace} {seed} {meets}", sum_of(build_sessions(config))


def of_others() -> Sums:
    """Prompts of graded tasks, and a workload of a user's own."""
    prompts = [(1, 2, 3), (4, 5), (6,) * 9]
    for seed in SEEDS:
        origin = Origin(source="local", location="x", revision=None)
        for arrivals in ARRIVALS:
            made = fixed_workload("x", prompts, GENERATION, arrivals=arrivals, seed=seed, origin=origin, description="")
            yield f"problems {seed} {arrivals.kind}", sum_of(made)
    where = f"{Dialogues.__module__}:{Dialogues.__name__}"
    for most in (1, 3):
        own = trace_source(Dialogues.__name__, TraceKnobs(workload=where), {"workload": where, "most": most})
        assert own is not None
        yield from _of_file(f"own {most}", own)


KINDS = (of_requests, of_sessions, of_conversations, of_families, of_http, of_files, of_dataset_files, of_others)


def found_of(kind: Callable[[], Sums]) -> dict[str, str]:
    return {name: hashlib.sha256(value.encode()).hexdigest()[:12] for name, value in kind()}


@pytest.mark.parametrize("kind", KINDS, ids=lambda each: each.__name__)
def test_no_workload_changes_by_the_way(kind):
    assert found_of(kind) == json.loads(STORED.read_text(encoding="utf-8"))[kind.__name__]


if __name__ == "__main__":
    STORED.write_text(f"{json.dumps({kind.__name__: found_of(kind) for kind in KINDS}, indent=1)}\n", encoding="utf-8")
