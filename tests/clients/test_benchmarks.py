"""Benchmark programs, each with its own documented command: all requests succeed, and their counts are the server's."""

import json

import pytest
from support.clients import VLLM

REQUESTS, LENGTH = 8, 16
PROMPT, ANSWER = 'repro_tokens_total{kind="prompt"}', 'repro_tokens_total{kind="completion"}'


def mean_s(served, name: str) -> float:
    return served.grown(f"repro_{name}_seconds_sum") / max(served.grown(f"repro_{name}_seconds_count"), 1)


def report(served, program: str, *, ttft_ms: float, e2el_ms: float) -> None:
    """Their latencies beside the server's, for the reader: no test judges by time."""
    ours = f"server: {1e3 * mean_s(served, 'time_to_first_block'):.1f}, {1e3 * mean_s(served, 'request'):.1f}"
    print(f"\n{program}: mean TTFT {ttft_ms:.1f} ms, E2EL {e2el_ms:.1f} ms ({ours})")


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm(served, run_client, tmp_path, route):
    out = tmp_path / "guidellm.json"
    words = f"--backend kind=openai_http,target={served.address},request_format={route}"
    words += f" --profile kind=concurrent,streams=2 --constraint kind=max_requests,count={REQUESTS}"
    words += f" --data kind=synthetic_text,prompt_tokens=32,output_tokens={LENGTH} --disable-console"
    files = ("--tokenizer", f"kind=hf_auto,model={served.tokenizer}", "--output", f"kind=json,path={out}")
    run_client("guidellm", "run", *words.split(), *files)
    (benchmark,) = json.loads(out.read_text())["benchmarks"]
    done = benchmark["requests"]["successful"]
    assert benchmark["requests"]["errored"] == []
    assert len(done) == REQUESTS
    assert served.refusals == 0
    # One request of its own asks whether the server is there.
    told = sum(
        each["request_statistics"]["output_metrics"]["text_tokens"]
        if "request_statistics" in each
        else each["output_tokens"]
        for each in done
    )
    assert told == REQUESTS * LENGTH
    assert served.grown(ANSWER) - told <= LENGTH
    names = ("time_to_first_token_ms", "request_latency")
    ttft_ms, e2el_s = (benchmark["metrics"][name]["successful"]["mean"] for name in names)
    report(served, "GuideLLM", ttft_ms=ttft_ms, e2el_ms=1e3 * e2el_s)


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_aiperf(served, run_client, tmp_path, kind):
    words = f"--endpoint-type {kind} --streaming --request-count {REQUESTS} --concurrency 2 --ui none"
    words += f" --synthetic-input-tokens-mean 32 --output-tokens-mean {LENGTH}"
    # An answer of nothing but ends has no text else, and AIPerf counts one without text as an error.
    for extra in (f"min_tokens:{LENGTH}", "ignore_eos:true", "skip_special_tokens:false"):
        words += f" --extra-inputs {extra}"
    own = ("--model", served.model, "--url", served.address, "--tokenizer", served.tokenizer)
    folder = ("--artifact-dir", str(tmp_path / "artifacts"))
    # Told to stay offline it looks for a folder's tokenizer in the hub's cache alone.
    run_client("aiperf", "profile", *words.split(), *own, *folder, offline=False)
    (found,) = (tmp_path / "artifacts").rglob("profile_export_aiperf.json")
    told = json.loads(found.read_text())
    assert told["request_count"]["avg"] == REQUESTS
    assert served.refusals == 0
    assert served.grown(ANSWER) == REQUESTS * LENGTH
    report(served, "AIPerf", ttft_ms=told["time_to_first_token"]["avg"], e2el_ms=told["request_latency"]["avg"])


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllm_bench_serve(served, run_client, tmp_path, backend):
    if not VLLM.is_file():
        pytest.skip("vLLM is not installed: repro install vllm")
    route = "/v1/chat/completions" if backend == "openai-chat" else "/v1/completions"
    words = f"--backend {backend} --endpoint {route} --num-prompts {REQUESTS} --max-concurrency 2"
    words += f" --dataset-name random --random-input-len 32 --random-output-len {LENGTH} --ignore-eos"
    words += " --percentile-metrics ttft,e2el --save-result --result-filename vllm.json"
    own = ("--base-url", served.address, "--model", served.model, "--tokenizer", served.tokenizer)
    run_client(VLLM, "bench", "serve", *words.split(), *own, "--result-dir", str(tmp_path))
    told = json.loads((tmp_path / "vllm.json").read_text())
    assert (told["completed"], told["failed"]) == (REQUESTS, 0)
    assert told["total_output_tokens"] == REQUESTS * LENGTH
    assert served.refusals == 0
    report(served, "vllm bench serve", ttft_ms=told["mean_ttft_ms"], e2el_ms=told["mean_e2el_ms"])
