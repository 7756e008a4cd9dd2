"""Cards, length statistics, sources, and the workloads made of them."""

import csv
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from support.tables import data_beside

from engines.dllm.config import GenerationConfig
from engines.dllm.sequence import steps_per_block
from engines.errors import UserError
from repro.paths import DATASETS
from repro.workloads.card import find_data_dir
from repro.workloads.dataset import HubReference, known_datasets, load_card
from repro.workloads.dataset_rows import load_hub_columns
from repro.workloads.draws import ArrivalConfig
from repro.workloads.table import estimate_tokens
from repro.workloads.workload import WorkloadConfig, build_workload, generation_of_length, prompt_text

REFUSED = data_beside(__file__, "refused")

PAPER_DATASETS = ("livebench", "burst", "osc")
GENERATION = GenerationConfig(gen_length=64, block_length=32, steps=64)


def config(dataset: str = "osc", **options: object) -> WorkloadConfig:
    defaults: dict = {
        "num_requests": 50,
        "seed": 3,
        "arrivals": ArrivalConfig(kind="poisson", rate=0.5),
        "source": "embedded",
        "max_prompt_len": 3744,
    }
    return WorkloadConfig(dataset=dataset, **{**defaults, **options})


def encode_words(text: str) -> list[int]:
    """A stand-in tokenizer: a word is a token, whose id tells the word's length."""
    return [len(word) for word in text.split()]


def lengths(workload: object) -> list[int]:
    return [request.prompt_len for request in workload.requests]


def write_jsonl(path: Path, *records: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


# Workloads from the embedded generator -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAPER_DATASETS)
def test_first_requests_of_a_longer_workload_are_the_same(name):
    short = build_workload(config(name, num_requests=20), GENERATION, encode=encode_words)
    long = build_workload(config(name, num_requests=60), GENERATION, encode=encode_words)
    assert long.requests[:20] == short.requests


def test_checksum_covers_token_ids():
    plain = build_workload(config(), GENERATION)
    words = build_workload(config(), GENERATION, encode=encode_words)
    shifted = build_workload(config(), GENERATION, encode=lambda text: [i + 1 for i in encode_words(text)])
    assert len({w.provenance.checksum for w in (plain, words, shifted)}) == 3
    assert lengths(plain) == lengths(words) == lengths(shifted)


@pytest.mark.parametrize("scale", [0.05, 1.0, 3.0])
@pytest.mark.parametrize("name", known_datasets())
def test_token_ids_have_exactly_the_scaled_length(name, scale):
    options = {"num_requests": 12, "length_scale": scale}
    simulated = build_workload(config(name, **options), GENERATION)
    real = build_workload(config(name, **options), GENERATION, encode=encode_words)
    assert lengths(simulated) == lengths(real)
    for request in real.requests:
        assert request.prompt_ids is not None
        assert len(request.prompt_ids) == request.prompt_len


def test_clipping_and_scaling_are_recorded():
    free = build_workload(config("burst", num_requests=400, max_prompt_len=29665), GENERATION)
    clipped = build_workload(config("burst", num_requests=400, max_prompt_len=500, min_prompt_len=100), GENERATION)
    expected = sum(n > 500 or n < 100 for n in lengths(free))
    assert clipped.provenance.num_clipped == expected > 0
    assert f"{expected} of 400 lengths clipped to [100, 500]" in clipped.provenance.description
    assert lengths(clipped) == [min(max(n, 100), 500) for n in lengths(free)]

    scaled = build_workload(config("burst", num_requests=400, max_prompt_len=29665, length_scale=0.5), GENERATION)
    assert lengths(scaled) == [max(8, round(n * 0.5)) for n in lengths(free)]
    assert scaled.provenance.length_scale == 0.5
    assert "lengths x 0.5" in scaled.provenance.description


@pytest.mark.parametrize(("options", "message"), REFUSED["workloads"])
def test_bad_configs_are_refused(options, message):
    with pytest.raises(UserError) as caught:
        build_workload(config(**options), GENERATION)
    assert message in str(caught.value)


def test_tokenizer_that_yields_nothing_is_refused():
    with pytest.raises(UserError, match="tokenizer returned no ids"):
        build_workload(config(), GENERATION, encode=lambda text: [])


# Generated text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["coding", "post", "chat", "math", "function"])
def test_text_has_about_the_asked_number_of_words_and_differs(style):
    texts = [prompt_text(style, random.Random(seed), 200).text for seed in range(30)]
    assert all(200 <= len(text.split()) < 240 for text in texts)
    assert len(set(texts)) == 30
    assert prompt_text(style, random.Random(7), 200).text == texts[7]
    assert "{" not in "".join(texts)


# Local files ---------------------------------------------------------------------------------------------------------


def test_auto_takes_a_local_file_from_the_data_directory_else_the_generator(tmp_path):
    cfg = config("gsm8k", source="auto", num_requests=3)
    assert build_workload(cfg, GENERATION, data_dir=tmp_path).provenance.source == "embedded"
    questions = [{"question": "x" * n, "answer": "4"} for n in (40, 80, 121)]
    path = write_jsonl(tmp_path / "gsm8k" / "gsm8k_test.jsonl", *questions)
    local = build_workload(cfg, GENERATION, data_dir=tmp_path)
    assert sorted(lengths(local)) == [10, 20, 31]
    provenance = local.provenance
    assert (provenance.source, provenance.location) == ("local", "gsm8k/gsm8k_test.jsonl")
    assert provenance.revision is not None
    assert provenance.revision.startswith("sha256:")
    assert "characters / 4" in provenance.description
    assert str(tmp_path) not in json.dumps(asdict(provenance))
    path.write_text(path.read_text() + "\n")
    assert build_workload(cfg, GENERATION, data_dir=tmp_path).provenance.revision != provenance.revision


def test_environment_names_the_data_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("REPRO_DATA_DIR", str(tmp_path))
    assert find_data_dir(None) == tmp_path
    monkeypatch.setenv("REPRO_DATA_DIR", str(tmp_path / "gone"))
    with pytest.raises(UserError, match=r"REPRO_DATA_DIR='.*gone' is not a directory: correct or unset it"):
        find_data_dir(None)
    monkeypatch.delenv("REPRO_DATA_DIR")
    assert find_data_dir(None) is None


def test_local_without_a_file_lists_what_is_accepted(tmp_path):
    with pytest.raises(UserError) as caught:
        build_workload(config("burst", source="local"), GENERATION, data_dir=tmp_path)
    message = str(caught.value)
    assert "burstgpt/BurstGPT_1.csv" in message
    assert "REPRO_DATA_DIR" in message
    assert "dataset_path" in message


def test_rows_are_all_used_before_any_repeats(tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", *({"prompt_len": n} for n in range(10, 20)))
    workload = build_workload(config(source="local", dataset_path=str(path), num_requests=25), GENERATION)
    got = lengths(workload)
    assert sorted(got[:10]) == sorted(got[10:20]) == list(range(10, 20))
    assert got[:10] != got[10:20]
    assert workload.provenance.num_repeated == 15
    assert "15 of 25 requests repeat a row" in workload.provenance.description
    assert (
        lengths(build_workload(config(source="local", dataset_path=str(path), num_requests=7), GENERATION)) == got[:7]
    )


def test_trace_arrivals_keep_lengths_beside_their_times(tmp_path):
    path = tmp_path / "BurstGPT_1.csv"
    rows = [(30, 300), (10, 100), (20, 0), (40, 400)]  # the third failed
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        + "".join(f"{stamp},ChatGPT,{tokens},5,0,API log\n" for stamp, tokens in rows)
    )
    cfg = config(
        "burst", dataset_path=str(path), source="local", num_requests=4, arrivals=ArrivalConfig(kind="trace", rate=1.0)
    )
    workload = build_workload(cfg, GENERATION)
    # 3 usable rows over 30 s: mean gap 15 s becomes 1 s, and the fourth request starts the trace again
    assert [(r.prompt_len, round(r.arrival_s, 6)) for r in workload.requests] == [
        (100, 0.0),
        (300, 1.333333),
        (400, 2.0),
        (100, 3.0),
    ]
    assert "1 rows with an empty prompt left out" in workload.provenance.description


@pytest.mark.parametrize(("records", "message"), REFUSED["trace_arrivals_need_timestamps"])
def test_trace_arrivals_need_timestamps(tmp_path, records, message):
    options: dict = {"arrivals": ArrivalConfig(kind="trace")}
    if records is not None:
        options |= {"source": "local", "dataset_path": str(write_jsonl(tmp_path / "t.jsonl", *records))}
    with pytest.raises(UserError, match=message):
        build_workload(config(**options), GENERATION)


def test_file_without_a_usable_row(tmp_path):
    path = tmp_path / "burstgpt1_first500.csv"
    path.write_text("row,request_tokens_clipped_1023,timestamp_s\n0,0,5\n")
    with pytest.raises(UserError, match=r"has no usable row \(1 read, none with a prompt\)"):
        build_workload(config("burst", source="local", dataset_path=str(path)), GENERATION)


def real_data_dir(name: str) -> Path:
    directory = os.environ.get("REPRO_DATA_DIR")
    if not directory or not (Path(directory) / name).is_file():
        pytest.skip(f"REPRO_DATA_DIR has no {name}")
    return Path(directory)


def test_osc_statistics_are_those_of_the_length_table():
    directory = real_data_dir("osc/tldr_post_lengths.csv")
    with (directory / "osc/tldr_post_lengths.csv").open() as file:
        posts = np.array([estimate_tokens(int(row["post_chars"])) for row in csv.DictReader(file)])
    stats = dict(load_card("osc").embedded.statistics)
    assert (stats["mean"], stats["std"]) == pytest.approx((posts.mean(), posts.std()), abs=0.01)
    workload = build_workload(config("osc", source="local", num_requests=100), GENERATION, data_dir=directory)
    assert workload.provenance.lengths.mean == pytest.approx(posts.mean() + 25)


@pytest.mark.parametrize(
    ("name", "path", "rows", "statistics"),
    data_beside(__file__, "workloads")["statistics_of_a_card_are_those_of_its_file"],
)
def test_statistics_of_a_card_are_those_of_its_file(name, path, rows, statistics):
    cfg = config(name, source="local", num_requests=rows, min_prompt_len=1)
    workload = build_workload(cfg, GENERATION, data_dir=real_data_dir(path))
    stats, found = dict(load_card(name).embedded.statistics), np.array(lengths(workload))
    for each in statistics:
        assert getattr(np, each)(found) == pytest.approx(stats[each], abs=0.01)
    assert workload.provenance.num_repeated == 0


# The hub -------------------------------------------------------------------------------------------------------------


Asked = list[tuple[HubReference, tuple[str, ...]]]


def hub_has(monkeypatch: pytest.MonkeyPatch, columns: Mapping[str, Sequence[object]]) -> Asked:
    """Puts ``columns`` on the hub; returns what is asked for."""
    asked: Asked = []

    def load(hub: HubReference, wanted: tuple[str, ...]) -> Mapping[str, Sequence[object]]:
        asked.append((hub, wanted))
        return columns

    monkeypatch.setattr("repro.workloads.dataset_rows.load_hub_columns", load)
    return asked


def test_hub_text_with_filter(monkeypatch):
    asked = hub_has(
        monkeypatch,
        {"turns": [["a" * 80], ["b" * 4000], ["c" * 40]], "task": ["LCB_generation", "agentic", "coding_completion"]},
    )
    workload = build_workload(config("livebench", source="hub", num_requests=2), GENERATION)
    assert sorted(lengths(workload)) == [10, 20]
    ((hub, wanted),) = asked
    assert (hub.id, hub.split, wanted) == ("livebench/coding", "test", ("turns", "task"))
    provenance = workload.provenance
    assert (provenance.source, provenance.location) == ("hub", "livebench/coding")
    assert provenance.revision == hub.revision is not None


def test_hub_token_counts_with_timestamps(monkeypatch):
    asked = hub_has(monkeypatch, {"Request tokens": [40, 0, 90], "Response tokens": [1, 0, 2], "Timestamp": [5, 6, 9]})
    cfg = config("burst", source="hub", num_requests=2, arrivals=ArrivalConfig(kind="trace"))
    workload = build_workload(cfg, GENERATION)
    assert [(r.prompt_len, r.arrival_s) for r in workload.requests] == [(40, 0.0), (90, 4.0)]
    assert asked[0][1] == ("Request tokens", "Timestamp")
    assert workload.provenance.revision is None


@pytest.mark.parametrize(("name", "columns", "message"), REFUSED["hub"])
def test_hub_rows_of_another_shape_are_refused(name, columns, message, monkeypatch):
    hub_has(monkeypatch, columns)
    with pytest.raises(UserError) as caught:
        build_workload(config(name, source="hub"), GENERATION)
    assert message in str(caught.value)


def test_hub_library_reads_columns(tmp_path):
    try:
        from datasets import load_dataset  # noqa: F401
    except ImportError:
        pytest.skip("the Hugging Face datasets library is not installed")
    write_jsonl(tmp_path / "test.jsonl", {"prompt": "a", "chosen": "b"}, {"prompt": "c", "chosen": "d"})
    hub = HubReference(id=str(tmp_path), config=None, split="test", revision=None, note="")
    assert load_hub_columns(hub, ("prompt",)) == {"prompt": ["a", "c"]}
    with pytest.raises(UserError, match="could not be loaded"):
        load_hub_columns(replace(hub, split="absent"), ("prompt",))


def test_hub_without_the_library_says_what_to_install():
    """In a fresh interpreter where only this repository's own ``datasets`` folder can be found."""
    code = (
        "import sys; from engines.errors import UserError; from repro.workloads.dataset import load_card;"
        "from repro.workloads.workload import open_source; card = load_card('osc');"
        "sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
        "try: open_source(card, 'hub')\n"
        "except UserError as error: print(error)"
    )
    root = DATASETS.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert "pip install 'datasets>=3.0', or use source='auto'" in done.stdout


def test_an_answer_of_a_length_of_its_own_keeps_the_steps_of_whole_blocks():
    own = [generation_of_length(replace(GENERATION, steps=32), tokens) for tokens in (128, 40, 39, 64)]
    assert [each.steps for each in own] == [64, 20, 20, 32]
    assert [steps_per_block(each) for each in own] == [(16,) * 4, (16, 4), (16, 4), (16, 16)]


def test_assumed_lengths_say_so():
    assert "ASSUMPTION" in build_workload(config("livebench"), GENERATION).provenance.description
    assert "ASSUMPTION" not in build_workload(config("burst"), GENERATION).provenance.description
