"""What a help says first: commands to copy, and of many options those that one needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Example(NamedTuple):
    line: str
    does: str


EXAMPLES: Mapping[str, tuple[Example, ...]] = {
    "reproduce": (
        Example("repro reproduce fig3", "Figure 3 of dLLM-Serve, on this CPU and for an RTX 4090"),
        Example("repro reproduce ampd/fig4", "a figure of another paper"),
    ),
    "figure": (Example("repro figure fig3 --platform l40s", "draw what 'repro reproduce' has made"),),
    "claims": (Example("repro claims --paper ampd", "a verdict on every claim of a paper"),),
    "check-results": (Example("repro check-results", "whether what is committed is today's"),),
    "bench": (
        Example(
            "repro bench --system laps --system sglang-pd --platform h200 --request-rate 65",
            "two systems at a rate of turns, simulated",
        ),
        Example(
            "repro bench --system ampd --platform h20x32 --num-prompts 40 --knob alpha=0.5",
            "another setting of one, on a cluster",
        ),
        Example("repro bench --num-prompts 8", "the embedded model on this CPU, measured"),
    ),
    "sweep": (Example("repro sweep grid.yaml --repeats 5", "every combination, with the seeds 0 to 4"),),
    "compare": (
        Example("repro compare dllm-serve sparse-dllm --metric e2el_s.mean", "two systems, in results/local"),
        Example("repro compare before after", "two folders of runs"),
    ),
    "export": (Example("repro export results/local --out runs.csv", "all runs as a table"),),
    "ablate": (
        Example("repro ablate --component scheduler --platform l40s", "one component switched, simulated"),
        Example("repro ablate --component routing", "of AMPD, ten paired seeds"),
    ),
    "eval": (
        Example("repro eval --task mini-code --limit 50", "how many of fifty problems the embedded model solves"),
    ),
    "generate": (Example("repro generate --prompt 'Question: How much is 3 + 5? Answer:'", "from the embedded model"),),
    "serve": (
        Example("repro serve", "the embedded model, at http://127.0.0.1:8000"),
        Example("repro serve --model Qwen/Qwen2.5-7B-Instruct --device cuda", "a checkpoint on a GPU"),
    ),
    "install": (Example("repro install vllm --dry-run", "print what would be done"),),
    "plan": (Example("repro plan --platform l40s --memory-limit 24GB", "how less memory would divide"),),
    "plan-cluster": (Example("repro plan-cluster --model Llama-3.1-70B --trace gaia --gpus 32", "splits of 32 GPUs"),),
    "capacity": (
        Example("repro capacity --workload gaia --slo ttft:p95:2000 --gpus 16", "the largest rate that 16 GPUs serve"),
    ),
    "list": (Example("repro list", "every name there is"), Example("repro list --knobs ampd", "what a system takes")),
    "doctor": (Example("repro doctor", "what this machine can run"),),
    "verify-baselines": (Example("repro verify-baselines", "every sampler, token by token"),),
    "gpu-suite": (Example("repro gpu-suite --first --dry-run", "what would be measured first"),),
    "calibrate": (Example("repro calibrate --platform l40s --dry-run", "the fit of a card"),),
    "train-tiny": (Example("repro train-tiny --steps 100 --out tiny", "a short training"),),
}

NEEDED: Mapping[str, tuple[str, ...]] = {
    "reproduce": ("platform", "reading", "num_prompts", "num_runs", "result_dir", "json"),
    "figure": ("platform", "reading", "result_dir", "out_dir", "json"),
    "bench": ("system", "platform", "dataset_name", "dataset_path", "request_rate", "num_prompts", "knob", "dry_run"),
    "ablate": ("component", "dataset", "platform", "request_rate", "num_runs", "plot"),
    "eval": ("task", "system", "platform", "limit", "model", "retention_ratio"),
    "generate": ("prompt", "model", "system", "gen_length", "device", "seed"),
    "serve": ("model", "platform", "device", "host", "port", "gen_length"),
    "plan-cluster": ("model", "trace", "gpus", "hardware", "rate", "slo_ttft_s", "slo_itl_s"),
    "capacity": ("workload", "slo", "gpus", "rate", "system", "platform", "plot"),
}
"""Options that a command shows first, where all are too many for one list."""
