"""What clients make of one and the same stream: python -m repro.bench.other_clients --clients VENV --vllm VENV --inference-perf VENV

A server sends answers of 16 tokens at known times, those of each stream below to every client: AIPerf and GuideLLM (of VENV, where they are installed),
'vllm bench serve', inference-perf, and 'repro bench --url'. Prints the table of docs/metrics.md: medians of what each reports, in ms. A client whose
environment is not given is left out. Needs the extra http.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from repro.bench.common import parser_of, run
from repro.paths import REPO
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.systems.http.record import CHUNKS, times_per_token

sys.path.append(str(REPO / "tests"))
from support.mock_openai import MockOpenAI, mock_server

TOKENS, FIRST_S, GAP_S, LATE_S = 16, 0.2, 0.05, 0.3
LAST_S = FIRST_S + GAP_S * (TOKENS - 1)
PASSES = 3
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
ABOUT = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}

Script = Sequence[bytes | float]
"""What is sent, behind the seconds from the request at which it is."""


def event(said: Any) -> bytes:
    return b"data: " + (said if isinstance(said, str) else json.dumps(said)).encode() + b"\n\n"


def piece(text: str, reason: str | None = None) -> bytes:
    return event({**ABOUT, "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]})


USAGE = event(
    {**ABOUT, "choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": TOKENS, "total_tokens": 8 + TOKENS}}
)
DONE = event("[DONE]")
ERROR = {"message": "no room", "type": "InternalServerError", "param": None, "code": 500}
"""As vLLM says it in a stream that has begun."""


def pieces(tokens: int = 1, *, has_reason: bool = True, num: int = TOKENS) -> list[bytes | float]:
    """Every 50 ms a token, so many in one event; two are a word."""
    found: list[bytes | float] = []
    for k in range(0, num, tokens):
        is_last = k + tokens >= TOKENS
        text = "".join("tok " if i % 2 else "tok" for i in range(k, k + tokens))
        found += [FIRST_S + GAP_S * k, piece(text, "length" if is_last and has_reason else None)]
    return found


STREAMS: dict[str, Script] = {
    "a token an event": (*pieces(), USAGE + DONE),
    "4 tokens an event": (*pieces(4), USAGE + DONE),
    "an empty event at 50 ms": (0.05, piece(""), *pieces(), USAGE + DONE),
    "a finish event 300 ms late": (*pieces(has_reason=False), LAST_S + LATE_S, piece("", "length") + USAGE + DONE),
    "usage 300 ms late": (*pieces(), LAST_S + LATE_S, USAGE + DONE),
    "no usage": (*pieces(), DONE),
    "no usage, 4 tokens an event": (*pieces(4), DONE),
    "no `[DONE]`": (*pieces(), USAGE),
    "ends after 8 tokens, without a word": (*pieces(num=8),),
    "an error event after 8 tokens": (*pieces(num=8), event({"error": ERROR}) + DONE),
    "all events in one read": (LAST_S, b"".join(p for p in pieces() if isinstance(p, bytes)) + USAGE + DONE),
}


class Reading(NamedTuple):
    """One request's times in ms; None where the client has no such number."""

    ttft: float | None
    latency: float | None
    per_token: float | None
    longest_gap: float | None
    tokens: float | None


FAILED = Reading(None, None, None, None, None)
Client = Callable[[str, Path, Path], dict[str, list[Reading]]]
"""Readings by stream, of a server's URL, the tokenizer's folder and an empty one."""


def main() -> None:
    parser = parser_of(__doc__)
    for name in ("clients", "vllm", "inference-perf"):
        parser.add_argument(f"--{name}", type=Path, help="virtual environment")
    parser.add_argument("--stream", action="append", choices=list(STREAMS), help="this alone; may be repeated")
    options = parser.parse_args()
    for name in STREAMS.keys() - set(options.stream or STREAMS):
        del STREAMS[name]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = tokenizer_in(folder / "tokenizer")
        found: dict[str, dict[str, list[Reading]]] = {"here": each_in_turn(ours, tokenizer, folder)}
        if options.vllm:
            client = in_environment(vllm, options.vllm)
            found[f"`vllm bench serve` {version(options.vllm, 'vllm')}"] = each_in_turn(client, tokenizer, folder)
        if options.clients:
            for title, package, client in (("AIPerf", "aiperf", aiperf), ("GuideLLM", "guidellm", guidellm)):
                name = f"{title} {version(options.clients, package)}"
                found[name] = each_in_turn(in_environment(client, options.clients), tokenizer, folder)
        if options.inference_perf:
            client = in_environment(inference_perf, options.inference_perf)
            name = f"inference-perf {version(options.inference_perf, 'inference-perf')}"
            found[name] = one_by_one(client, tokenizer, folder)
    print(table(found))
    if options.json:
        options.json.write_text(
            json.dumps({c: {s: [r._asdict() for r in rs] for s, rs in f.items()} for c, f in found.items()})
        )


def table(found: Mapping[str, Mapping[str, Sequence[Reading]]]) -> str:
    lines = ["| the stream | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
    for stream in STREAMS:
        lines.append(f"| {stream} | " + " | ".join(cell_of(readings[stream]) for readings in found.values()) + " |")
    return "\n".join(lines)


def cell_of(readings: Sequence[Reading]) -> str:
    if all(each == FAILED for each in readings):
        return "failed"
    told = []
    for name in ("ttft", "latency", "per_token", "longest_gap", "tokens"):
        values = [value for each in readings if (value := getattr(each, name)) is not None]
        told.append(f"{median(values):.0f}" if values else "-")
    return " / ".join(told)


# -- the server -------------------------------------------------------------------------------------------------


def serving(streams: Sequence[str]) -> tuple[MockOpenAI, list[str]]:
    """Sends these in turn, and those that were sent."""
    sent: list[str] = []

    def says() -> Iterable[bytes | float]:
        sent.append(streams[len(sent) % len(streams)])
        yield HEAD
        for part in (*STREAMS[sent[-1]], b""):
            yield part if isinstance(part, float) else b"%x\r\n%s\r\n" % (len(part), part)

    return MockOpenAI(model="m", raw={"post /v1/": says}), sent


def each_in_turn(client: Callable[..., list[Reading]], tokenizer: Path, folder: Path) -> dict[str, list[Reading]]:
    """One run, of which the client tells every request."""
    mock, sent = serving(list(STREAMS))
    num = PASSES * len(STREAMS)
    with mock_server(mock) as url:
        readings = client(url, tokenizer, Path(tempfile.mkdtemp(dir=folder)), num)
    assert len(sent) == len(readings) == num, f"{len(sent)} requests were sent and {len(readings)} told, not {num}"
    return {name: [each for at, each in zip(sent, readings, strict=True) if at == name] for name in STREAMS}


def one_by_one(client: Callable[..., list[Reading]], tokenizer: Path, folder: Path) -> dict[str, list[Reading]]:
    """A run for each stream, of which the client tells the whole."""
    found = {}
    for name in STREAMS:
        with mock_server(serving([name])[0]) as url:
            found[name] = client(url, tokenizer, Path(tempfile.mkdtemp(dir=folder)), PASSES)
    return found


def tokenizer_in(folder: Path) -> Path:
    """Every word is a token, but for the answers'."""
    folder.mkdir()
    words = ["<unk>", "</s>", "tok", *(f"w{i}" for i in range(500))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("tok", "isolated")]
    )
    backend.save(str(folder / "tokenizer.json"))
    special = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "</s>"}
    told = {"tokenizer_class": "PreTrainedTokenizerFast", **special, "model_max_length": 4096}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


# -- the clients ------------------------------------------------------------------------------------------------


def version(environment: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    said = subprocess.run([environment / "bin/python", "-c", code], check=True, capture_output=True, text=True)
    return said.stdout.strip()


def in_environment(client: Callable[..., list[Reading]], environment: Path) -> Callable[..., list[Reading]]:
    return lambda *given: client(environment / "bin", *given)


def call(*words: object, **environment: str) -> None:
    asked = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run([str(word) for word in words], env=asked, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}: {done.stdout[-3000:]}{done.stderr[-3000:]}")


def ours(url: str, tokenizer: Path, folder: Path, num: int) -> list[Reading]:
    knobs: dict[str, Any] = {
        "url": url,
        "num_prompts": num,
        "gen_length": TOKENS,
        "input_len": 8,
        "num_warmups": 0,
        "max_concurrency": 1,
    }
    cell = Cell(
        system="openai-http",
        dataset="gsm8k",
        platform="endpoint",
        executor="http",
        rate=None,
        seed=0,
        knobs=(*knobs.items(), ("tokenizer", str(tokenizer))),
    )
    record = prepare(cell).run()
    rows, chunks = record.requests, record.tables[CHUNKS]
    found = []
    for number, per_token in enumerate((1e3 * times_per_token(record)).tolist()):
        row = {name: values[number] for name, values in rows.items()}
        stamps = [at for owner, at in zip(chunks["request_id"], chunks["arrived_s"], strict=True) if owner == number]
        if row["error"] is not None:
            found.append(FAILED)
            continue
        begun_s = row["arrival_s"] + row["submit_lag_s"]
        gap = 1e3 * float(np.diff(stamps).max())
        ttft, latency = (1e3 * (row[name] - begun_s) for name in ("first_output_s", "finished_s"))
        found.append(Reading(ttft, latency, None if np.isnan(per_token) else per_token, gap, row["output_len"]))
    return found


_VLLM = """
import argparse, json, sys
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
found = main(parser.parse_args(sys.argv[2:]))
json.dump({name: found[name] for name in ("ttfts", "latencies", "itls", "output_lens", "errors")}, open(sys.argv[1], "w"))
"""


def vllm(bin_: Path, url: str, tokenizer: Path, folder: Path, num: int) -> list[Reading]:
    """Its time per token is made of its own numbers for each request, as in its code: (latency - ttft) / (tokens - 1)."""
    words = f"--base-url {url} --model m --dataset-name random --random-input-len 8 --random-output-len {TOKENS} --num-prompts {num}"
    words += " --max-concurrency 1 --ready-check-timeout-sec 0 --save-detailed --disable-tqdm --tokenizer"
    call(bin_ / "python", "-c", _VLLM, folder / "out", *words.split(), tokenizer, HF_HUB_OFFLINE="1")
    told = json.loads((folder / "out").read_text())
    found = []
    for ttft, latency, gaps, tokens, error in zip(*(told[name] for name in told), strict=True):
        each = Reading(
            1e3 * ttft, 1e3 * latency, 1e3 * (latency - ttft) / (tokens - 1), 1e3 * max(gaps, default=0.0), tokens
        )
        found.append(FAILED if error else each)
    return found


def aiperf(bin_: Path, url: str, tokenizer: Path, folder: Path, num: int) -> list[Reading]:
    """It takes a tokenizer's folder only while HF_HUB_OFFLINE is not set."""
    words = f"profile --model m --url {url} --endpoint-type completions --streaming --request-count {num} --concurrency 1 --ui-type none"
    words += f" --synthetic-input-tokens-mean 8 --output-tokens-mean {TOKENS} --num-dataset-entries {num} --tokenizer"
    call(bin_ / "aiperf", *words.split(), tokenizer, "--output-artifact-dir", folder, HF_HUB_OFFLINE="")
    found = {}
    for line in (folder / "profile_export.jsonl").read_text().splitlines():
        told = json.loads(line)
        values = {name: each["value"] for name, each in told["metrics"].items()}
        each = Reading(
            values.get("time_to_first_token"),
            values.get("request_latency"),
            values.get("inter_token_latency"),
            max(values["inter_chunk_latency"]) if values.get("inter_chunk_latency") else None,
            values.get("output_sequence_length"),
        )
        found[told["metadata"]["request_start_ns"]] = FAILED if told.get("error") else each
    return [found[start] for start in sorted(found)]


def guidellm(bin_: Path, url: str, tokenizer: Path, folder: Path, num: int) -> list[Reading]:
    rows = [{"prompt": f"w1 w2 w3 w4 w5 w6 w7 w{i}", "output_tokens_count": TOKENS} for i in range(num)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    call(
        *(
            bin_ / "guidellm",
            "run",
            "--backend",
            f"kind=openai_http,target={url},model=m,request_format=/v1/completions",
        ),
        *("--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={num}", "--disable-console"),
        *("--data", f"kind=json_file,path={folder}/in.jsonl", "--tokenizer", f"kind=hf_auto,model={tokenizer}"),
        *("--output", f"kind=json,path={folder}/out.json"),
        HF_HUB_OFFLINE="1",
    )
    (told,) = json.loads((folder / "out.json").read_text())["benchmarks"]
    found = {}
    for each in told["requests"]["successful"]:
        times = (each["time_to_first_token_ms"], 1e3 * each["request_latency"], each["inter_token_latency_ms"])
        found[each["request_start_time"]] = Reading(*times, None, each["output_tokens"])
    found |= {each["request_start_time"]: FAILED for each in told["requests"]["errored"]}
    return [found[start] for start in sorted(found)]


def inference_perf(bin_: Path, url: str, tokenizer: Path, folder: Path, num: int) -> list[Reading]:
    """The medians of a run, and its largest gap."""
    lengths = {
        name: {"min": n, "max": n, "mean": n, "std_dev": 0, "total_count": num}
        for name, n in (("input", 8), ("output", TOKENS))
    }
    asked = {
        "api": {"type": "completion", "streaming": True},
        "data": {"type": "random", **{f"{name}_distribution": each for name, each in lengths.items()}},
        "load": {"type": "concurrent", "num_workers": 1, "stages": [{"num_requests": num, "concurrency_level": 1}]},
        "server": {"type": "vllm", "model_name": "m", "base_url": url},
        "tokenizer": {"pretrained_model_name_or_path": str(tokenizer)},
        "storage": {"local_storage": {"path": str(folder / "out")}},
    }
    (folder / "in.yaml").write_text(json.dumps(asked))  # which is YAML
    call(bin_ / "inference-perf", "-c", folder / "in.yaml", HF_HUB_OFFLINE="1")
    told = json.loads((folder / "out/summary_lifecycle_metrics.json").read_text())["successes"]
    if not told["count"]:
        return [FAILED]
    at = {name: told["latency"][name] for name in told["latency"]}

    def ms(name: str, stat: str) -> float | None:
        return None if not at.get(name) else 1e3 * at[name][stat]

    times = (
        ms("time_to_first_token", "median"),
        ms("request_latency", "median"),
        ms("time_per_output_token", "median"),
    )
    return [Reading(*times, ms("inter_token_latency", "max"), told["output_tokens"]["median"])]


if __name__ == "__main__":
    run(main)
