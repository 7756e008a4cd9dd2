"""The LM Evaluation Harness against the server: its own tasks, over a few problems of their shapes, as no hub is in reach."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

TASKS = (
    Path(importlib.util.find_spec("lm_eval").origin or "").parent / "tasks"
    if importlib.util.find_spec("lm_eval")
    else Path()
)
EXACT = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
PROBLEMS = Path(__file__).with_name("problems")
"""Four problems of each task, in the harness's own columns."""


def write_task(folder: Path, name: str, task: dict[str, Any]) -> None:
    """A task with its problems for every split it reads."""
    files = dict.fromkeys(("train", "test", "validation"), str(PROBLEMS / f"{name}.jsonl"))
    own = {"task": name, "dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task | own))


class _Loader(yaml.SafeLoader):
    pass


_Loader.add_constructor("!function", lambda loader, node: node.value)


def humaneval() -> dict[str, Any]:
    """What the harness's HumanEval asks of a server; its metric would be fetched from a hub."""
    task = yaml.load((TASKS / "humaneval" / "humaneval.yaml").read_text(), _Loader)
    kept = ("output_type", "test_split", "doc_to_text", "doc_to_target", "generation_kwargs")
    return {name: task[name] for name in kept} | {"metric_list": EXACT}


@pytest.fixture
def tasks(tmp_path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    write_task(folder, "humaneval_few", humaneval())
    write_task(folder, "gsm8k_few", {"include": str(TASKS / "gsm8k" / "gsm8k-cot-llama.yaml")})
    write_task(folder, "hellaswag_few", {"include": str(TASKS / "hellaswag" / "hellaswag.yaml")})
    return folder


def evaluate(run_client, served, tasks: Path, kind: str, task: str, *options: str, **own: str) -> dict[str, Any]:
    route = "chat/completions" if kind == "local-chat-completions" else "completions"
    arguments = {
        "model": served.model,
        "base_url": f"{served.address}/v1/{route}",
        "tokenizer": served.tokenizer,
        "num_concurrent": "2",
        "max_retries": "1",
        **own,
    }
    text = ",".join(f"{name}={value}" for name, value in arguments.items())
    out = tasks.parent / "out"
    folders = ("--include_path", str(tasks), "--output_path", str(out))
    run_client(
        "lm_eval", "run", "--model", kind, "--model_args", text, "--tasks", task, *folders, "--log_samples", *options
    )
    (found,) = out.rglob("results_*.json")
    return dict(json.loads(found.read_text())["results"][task])


def shots(served, task: str) -> tuple[str, ...]:
    """Eight worked problems do not fit into the context of an embedded model."""
    return ("--num_fewshot", "1") if task == "gsm8k_few" and "qwen" not in served.tokenizer else ()


@pytest.mark.parametrize("task", ["humaneval_few", "gsm8k_few"])
def test_completions(served, run_client, tasks, task):
    options = ("--gen_kwargs", "max_gen_toks=32", *shots(served, task))
    found = evaluate(run_client, served, tasks, "local-completions", task, *options, tokenized_requests="False")
    assert any(name.startswith("exact_match") for name in found)
    assert served.grown("repro_requests_total") == 4
    assert served.refusals == 0


def test_chat_completions(served, run_client, tasks):
    options = ("--apply_chat_template", "--gen_kwargs", "max_gen_toks=32", *shots(served, "gsm8k_few"))
    evaluate(run_client, served, tasks, "local-chat-completions", "gsm8k_few", *options)
    assert served.grown("repro_requests_total") == 4
    assert served.refusals == 0


def test_likelihoods_are_those_of_transformers(causal, run_client, tasks):
    causal.mark()
    ours = evaluate(run_client, causal, tasks, "local-completions", "hellaswag_few")
    assert causal.refusals == 0
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(causal.tokenizer)
    model = AutoModelForCausalLM.from_pretrained(causal.tokenizer)

    def likelihood(context: str, ending: str) -> float:
        ids = tokenizer(context + " " + ending, return_tensors="pt").input_ids
        start = len(tokenizer(context).input_ids)
        with torch.no_grad():
            rows = model(ids).logits[0].log_softmax(-1)
        return float(sum(rows[i - 1, ids[0, i]] for i in range(start, ids.shape[1])))

    (samples,) = (tasks.parent / "out").rglob("samples_hellaswag_few_*.jsonl")
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        for argument, answer in zip(sample["arguments"].values(), sample["resps"], strict=True):
            context, ending = argument["arg_0"], argument["arg_1"].removeprefix(" ")
            assert float(answer[0][0]) == pytest.approx(likelihood(context, ending), abs=2e-2)
    assert 0 <= ours["acc,none"] <= 1
