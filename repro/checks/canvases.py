"""Cases for canvas models. The engine replays DiffusionGemma's recorded answers with the recorded draws, or compares the embedded model
with a plain loop. That loop runs one request, computes every forward over the whole sequence under a mask, and applies the rule to lists.

Recorded cases do not come with the package. ``REPRO_GEMMA_GOLDENS`` names their folder, with ``cases.json``, maybe ``probe.json``, and the
tiny checkpoints they were made with. The requests of one case are served separately, and do not affect each other.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from engines.blockdiffusion.canvas_executor import CanvasDraws, CanvasExecutor
from engines.blockdiffusion.engine import BlockEngine
from engines.blockdiffusion.rules import Blocks, EntropyBudget, Floats, Verdict
from engines.blockdiffusion.scheduler import BlockEngineConfig
from engines.blockdiffusion.sequence import BlockRequest, BlockSampling, BlockStepPlan, Denoised, Outcome
from engines.errors import UserError
from engines.models.gemma import CanvasRows, GemmaModel
from engines.runtime.rows import Ints
from repro.checks.blocks import load_checkpoint
from repro.checks.goldens import other_ids
from repro.families.block.settings import EMBEDDED_DIRS, EMBEDDED_TASKS, settings_of_requests
from repro.families.block.text import text_of
from repro.tasks.mini import GENERATORS

FOLDER_VARIABLE = "REPRO_GEMMA_GOLDENS"
_LONGEST = 256
"""Most tokens of a case."""
ENTROPY, PROBED = 2e-3, 2e-4
"""Largest allowed difference of an entropy, and of a probed number."""
_STEPS = 4096


@dataclass(frozen=True, kw_only=True)
class CanvasCase:
    id: str
    checkpoint: Path
    raw: Mapping[str, Any] = field(default_factory=dict)
    """The case as recorded."""
    request: BlockRequest | None = None
    """The request for the plain loop, instead of a recorded case."""
    method: str = "canvas entropy-budget"
    required: bool = True
    tie_sensitive: bool = False


@dataclass(frozen=True, kw_only=True)
class CanvasResult:
    case: CanvasCase
    difference: str | None
    """The first difference from the record, in words; None if there is none."""

    @property
    def passed(self) -> bool:
        return self.difference is None


@dataclass(frozen=True, kw_only=True)
class TracedRule(EntropyBudget):
    """A rule that records its verdicts. Each request of a replay has its own."""

    number: int = 0
    accepted: list[str] = field(default_factory=list, compare=False)
    entropies: list[Floats] = field(default_factory=list, compare=False)

    def decide(self, blocks: Blocks, tokens: Ints, confidence: Floats) -> Verdict:
        verdict = super().decide(blocks, tokens, confidence)
        self.accepted.append("".join(map(str, verdict.take[0].astype(int))))
        self.entropies.append(-confidence[0])
        return verdict


class RecordedDraws(CanvasDraws):
    """The recorded draws, by the request's number, which stands in its seed."""

    def __init__(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        self._rows = rows

    def start(self, seed: Ints, draw: Ints, position: Ints, vocabulary: int) -> Ints:
        return np.array([self._canvas(*pair)["start"] for pair in zip(seed[:, 0], draw[:, 0], strict=True)])

    def noise(self, seed: Ints, draw: Ints, position: Ints, vocabulary: int) -> Ints:
        return np.array([self._step(*pair)["renoise"] for pair in zip(seed[:, 0], draw[:, 0], strict=True)])

    def tokens(self, logits: Tensor, seed: Tensor, draw: Tensor, position: Tensor) -> Tensor:
        tokens = []
        for number, draw_index, pos in zip(seed.tolist(), draw.tolist(), position.tolist(), strict=True):
            sampled = self._step(number, draw_index)["sampled"]
            tokens.append(sampled[(pos - len(self._rows[number]["prompt"])) % len(sampled)])
        return torch.tensor(tokens, device=logits.device)

    def _canvas(self, number: int, draw: int) -> Mapping[str, Any]:
        canvases = self._rows[int(number)]["canvases"]
        canvas: Mapping[str, Any] = canvases[min(int(draw) // _STEPS, len(canvases) - 1)]
        return canvas

    def _step(self, number: int, draw: int) -> Mapping[str, Any]:
        """The recorded step. If the replay runs longer, and so already differs, this is the last one."""
        steps = self._canvas(number, draw)["steps"]
        step: Mapping[str, Any] = steps[min(int(draw) % _STEPS, len(steps) - 1)]
        return step


class TracingExecutor(CanvasExecutor):
    """An executor that records the likeliest tokens of every forward, by request."""

    def run(self, plan: BlockStepPlan, denoised: Denoised) -> Outcome:
        outcome = super().run(plan, denoised)
        if not hasattr(self, "likeliest"):
            self.likeliest: dict[int, list[list[int]]] = {}
        numbers = [work.request_id for work in plan.works if work.rows is not None]
        assert outcome.likeliest is not None
        for number, likeliest in zip(numbers, outcome.likeliest.tolist(), strict=True):
            self.likeliest.setdefault(number, []).append(likeliest)
        return outcome


def canvas_cases() -> tuple[str, list[CanvasCase]]:
    """The origin of the cases, and the cases: recorded ones if their folder is named, or else the embedded model's."""
    origin = os.environ.get(FOLDER_VARIABLE)
    if not origin:
        return "the embedded model of canvases and a plain loop", list(embedded_canvases())
    folder, cases = Path(origin), []
    for name in ("cases", "probe"):
        path = folder / f"{name}.json"
        if not path.is_file():
            if name == "probe":
                continue
            raise UserError(f"{FOLDER_VARIABLE}={origin!r} has no {path.name}: give the folder of recorded cases")
        content = json.loads(path.read_text(encoding="utf-8"))
        for i, raw in enumerate(content if isinstance(content, list) else content["cases"]):
            case = CanvasCase(id=raw.get("name", f"{name}-{i}"), checkpoint=folder / raw["checkpoint"], raw=raw)
            cases.append(case if name == "cases" else replace(case, method="canvas probe"))
    return origin, cases


def verify_canvases(cases: Sequence[CanvasCase], *, device: str = "cpu", max_tokens: int = 64) -> list[CanvasResult]:
    """Replay cases in float32. Requests of one checkpoint are served together, with at most ``max_tokens`` tokens per step."""
    differences: dict[str, str | None] = {}
    for checkpoint in dict.fromkeys(case.checkpoint for case in cases):
        model = load_checkpoint(checkpoint, device)
        assert isinstance(model, GemmaModel)
        differences |= _plain_diffs(model, [case for case in cases if case.checkpoint == checkpoint and case.request])
        recorded = [case for case in cases if case.checkpoint == checkpoint and not case.request]
        served: dict[int, tuple[CanvasCase, int, BlockRequest]] = {}
        for case in recorded:
            if case.method == "canvas probe":
                differences[case.id] = probe(model, case.raw)
                continue
            try:
                for row in range(max(1, len(case.raw.get("rows", ())))):
                    served[len(served)] = case, row, _request(case.raw, row, len(served), model.config.block_length)
            except UserError as error:
                differences[case.id] = None if "error" in case.raw else f"refused: {error}"
        refused = [case.id for case, _, _ in served.values() if "error" in case.raw]
        differences |= dict.fromkeys(refused, "served, and recorded as refused")
        served = {number: entry for number, entry in served.items() if entry[0].id not in refused}
        for case, difference in _replay(model, served, max_tokens):
            differences[case.id] = differences.get(case.id) or difference
    return [CanvasResult(case=case, difference=differences[case.id]) for case in cases]


def _request(raw: Mapping[str, Any], row: int, number: int, block: int) -> BlockRequest:
    params = raw["params"]
    rule = TracedRule(
        number=number,
        steps=params["max_denoising_steps"],
        entropy_bound=_float(params, "entropy_bound"),
        stability=params["stability_threshold"],
        confidence=_float(params, "confidence_threshold") or 0.0,
        t_min=params["t_min"],
        t_max=params["t_max"],
    )
    ends = params["eos_token_id"]
    return BlockRequest(
        request_id=number,
        prompt_ids=tuple(raw["rows"][row]["prompt"]) if raw.get("rows") else (0,),
        gen_length=-(-params["max_new_tokens"] // block) * block,
        rule=rule,
        sampling=BlockSampling(seed=number),
        stop_ids=frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends]),
    )


def _float(options: Mapping[str, Any], name: str) -> Any:
    """Reads a float. transformers refuses a whole number, which our rule would accept as a float, so this refuses it too."""
    value = options[name]
    if type(value) is int:
        raise UserError(f"{name}={value} is a whole number: give a float")
    return value


def _replay(
    model: GemmaModel, served: Mapping[int, tuple[CanvasCase, int, BlockRequest]], max_tokens: int
) -> Iterator[tuple[CanvasCase, str | None]]:
    """Yields each request's case, and the first difference from the record or None."""
    if not served:
        return
    rows = {number: case.raw["rows"][row] for number, (case, row, _) in served.items()}
    executor = TracingExecutor(
        model,
        draws=RecordedDraws(rows),
        num_slots=len(rows),
        max_len=_LONGEST,
        num_tokens=len(rows) * _LONGEST,
        block_size=4,
    )
    config = BlockEngineConfig(max_num_batched_tokens=max_tokens)
    answers = BlockEngine(executor, config).run([request for _, _, request in served.values()])
    for number, (case, _, request) in served.items():
        recorded, rule, answer = rows[number], request.rule, answers[number]
        assert isinstance(rule, TracedRule)
        steps = [step for canvas in recorded["canvases"] for step in canvas["steps"]]
        cut = next((i + 1 for i, token in enumerate(recorded["output"]) if token in request.stop_ids), None)
        difference = other_ids(list(answer.ids), tuple(recorded["output"][:cut]))
        if difference is None and answer.denoised != recorded["denoise_forwards"]:
            difference = f"{answer.denoised} forwards, recorded {recorded['denoise_forwards']}"
        traces = zip(rule.accepted, executor.likeliest[number], rule.entropies, steps, strict=False)
        for i, (accepted, likeliest, entropy, step) in enumerate(traces):
            error = float(np.abs(entropy - np.array(step["H"])).max())
            for name, ours, theirs in (("accept", accepted, step["accept"]), ("argmax", likeliest, step["argmax"])):
                if ours != theirs:
                    difference = difference or f"step {i}: {name} {ours}, recorded {theirs}"
            if error > ENTROPY:
                difference = difference or f"step {i}: entropies off by {error:.2g}"
        yield case, difference
    executor.close()


# ---- the embedded model against a plain loop -----------------------------------------------------------------------------


def embedded_canvases(count: int = 2) -> Iterator[CanvasCase]:
    """Yields ``count`` held-out problems of each task."""
    checkpoint, settings = EMBEDDED_DIRS["tiny-canvas"], settings_of_requests({"model": "tiny-canvas"})
    text, rule = text_of(settings), replace(cast(EntropyBudget, settings.rule), steps=12)
    for task in EMBEDDED_TASKS:
        for i, problem in enumerate(GENERATORS[task](23, count, "heldout", num_facts=(2, 6), num_distractors=(0, 3))):
            request = BlockRequest(
                request_id=i,
                prompt_ids=text.encode(problem.prompt),
                gen_length=settings.knobs.gen_length // 2,
                rule=rule,
                sampling=BlockSampling(seed=i),
                stop_ids=text.end_ids,
            )
            yield CanvasCase(id=f"{task}-{i}", checkpoint=checkpoint, method="block entropy-budget", request=request)


def _plain_diffs(model: GemmaModel, cases: Sequence[CanvasCase]) -> dict[str, str | None]:
    """Serve all cases together, and return each one's difference from the plain loop."""
    if not cases:
        return {}
    requests = [replace(case.request, request_id=i) for i, case in enumerate(cases) if case.request]
    n, plain_model = len(cases), cast(GemmaModel, load_checkpoint(cases[0].checkpoint))
    executor = CanvasExecutor(model, num_slots=n, max_len=_LONGEST, num_tokens=n * _LONGEST, block_size=4)
    answers = BlockEngine(executor).run(requests)
    executor.close()
    differences: dict[str, str | None] = {}
    for case, request in zip(cases, requests, strict=True):
        answer, (ids, forwards) = answers[request.request_id], plain_answer(plain_model, request, executor.block)
        differences[case.id] = other_ids(list(answer.ids), tuple(ids))
        if differences[case.id] is None and answer.denoised != forwards:
            differences[case.id] = f"{answer.denoised} forwards, the plain loop {forwards}"
    return differences


@torch.inference_mode()
def plain_answer(model: GemmaModel, request: BlockRequest, block: int) -> tuple[list[int], int]:
    """The plain loop's answer ids, and the number of its denoising forwards."""
    draws, rule = CanvasDraws(), cast(EntropyBudget, request.rule)
    final, forwards, start = list(request.prompt_ids), 0, request.prompt_len
    while len(final) < request.total and request.stop_ids.isdisjoint(final[start:]):
        seed = np.full((1, block), request.sampling.seed, dtype=np.int64)
        draw = np.full_like(seed, (len(final) - start) // block * _STEPS)
        position = np.arange(len(final), len(final) + block)[None]
        ids = draws.start(seed, draw, position, model.config.vocab_size)[0].tolist()
        soft, history = torch.zeros(block, model.config.d_model), list[list[int]]()
        for step in range(rule.steps):
            hidden = plain_hidden(model, final + ids, soft)[len(final) :]
            z = model.logits(hidden) / rule.temperature(step)
            p, entropies = z.softmax(dim=-1), (-z.softmax(dim=-1) * z.log_softmax(dim=-1)).sum(dim=-1).tolist()
            soft, forwards = model.soft_embeddings(p), forwards + 1
            history.append(z.argmax(dim=-1).tolist())
            ids, spent = draws.noise(seed, draw, position, model.config.vocab_size)[0].tolist(), 0.0
            sampled = draws.tokens(z, *(torch.from_numpy(array[0]) for array in (seed, draw, position))).tolist()
            for i in sorted(range(block), key=entropies.__getitem__):
                if spent <= rule.entropy_bound:
                    ids[i] = sampled[i]
                spent += entropies[i]
            last = history[-rule.stability - 1 :]
            is_stable = len(last) > rule.stability and all(row == last[-1] for row in last)
            if is_stable and spent / block < rule.confidence:
                break
            draw += 1
        final += history[-1]
    cut = next((i for i, token in enumerate(final) if i >= start and token in request.stop_ids), len(final))
    return final[start : request.total][: cut + 1 - start], forwards


@torch.inference_mode()
def probe(model: GemmaModel, raw: Mapping[str, Any]) -> str | None:
    """Compare single forwards of a canvas after a prompt, and after one more committed canvas; returns the first difference or None."""
    block, prompt = model.config.block_length, list(raw["prompt"])
    for prefix, hidden, logits in (
        (prompt, "hidden_prompt_last", "logits_first_step"),
        (prompt + list(raw["committed"]), "hidden_committed_last", "logits_after_commit"),
    ):
        soft = torch.zeros(block, model.config.d_model)
        states = plain_hidden(model, prefix + list(raw["canvas"]), soft)
        outputs = {hidden: states[len(prefix) - 1], logits: model.logits(states[len(prefix) :])}
        if prefix == prompt:
            p = (outputs[logits] / 0.8).softmax(dim=-1)
            next_states = plain_hidden(model, prefix + list(raw["canvas"]), model.soft_embeddings(p))
            outputs["logits_second_step"] = model.logits(next_states[len(prefix) :])
        for name, value in outputs.items():
            error = (value - torch.tensor(raw[name])).abs().max().item()
            if not error <= PROBED:
                return f"{name} is off by {error:.2g}"
    return None


def plain_hidden(model: GemmaModel, ids: Sequence[int], soft: Tensor) -> Tensor:
    """[N, d] Hidden states of final tokens and a canvas after them, in one forward over all tokens under masks."""
    config, n, start = model.config, len(ids), len(ids) - len(soft)
    position = torch.arange(n)
    masks = {True: position <= position[:, None]}
    masks[False] = masks[True] & (position > position[:, None] - config.window)
    masks[True][start:] = True
    masks[False][start:] = position >= start - (config.window - 1)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        mask = masks[config.is_full(layer)]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1)

    rows = CanvasRows(position[start:], soft)
    return model.hidden(torch.tensor(ids), model.rotary(position), attend, rows)
