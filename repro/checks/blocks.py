"""Cases for block diffusion. They are recorded by the authors' own code, or compare the embedded model with a plain loop. That loop runs
one request, computes every forward over the whole sequence under the block mask, and applies rules to lists.

Recorded cases do not come with the package. ``REPRO_BLOCK_GOLDENS`` names their folder, with ``*_cases.json`` and the tiny checkpoints they
were made with. Two kinds cannot be reproduced. One is a prompt of exactly one block of Fast-dLLM v2, which its script ignores. The other
are cases whose script failed or overwrote the prompt.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.blockdiffusion.rules import (
    DecodeRule,
    Dynamic,
    JointThreshold,
    LowConfidence,
    Sequential,
    Static,
    SubBlocks,
)
from engines.blockdiffusion.sequence import BlockAnswer, BlockRequest, BlockSampling
from engines.errors import UserError
from engines.models.block_config import BlockConfig
from engines.models.packed import PackedModel
from repro.checks.goldens import other_ids
from repro.families.block.settings import EMBEDDED, EMBEDDED_DIRS

# -- the plain loop ---------------------------------------------------------------------------------------

Logits = Callable[[PackedModel[BlockConfig], list[int], int], Tensor]


@torch.inference_mode()
def masked_logits(model: PackedModel[BlockConfig], ids: list[int], block: int) -> Tensor:
    """[N, V] Logits of a whole sequence from the packed model, with the block mask in its attention."""
    position = torch.arange(len(ids))
    mask = (position // block)[None] <= (position // block)[:, None]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1)

    return model.logits(model(torch.tensor(ids), position, attend))


@dataclass
class Plain:
    ids: list[int] = field(default_factory=list)
    """Tokens of whole blocks, after the prompt."""
    denoised: int = 0
    sglang_forwards: int = 0
    """Forwards of SGLang's loop. It runs a final block once more, and a block that the limit of edits ended twice more."""
    trace: list[tuple[list[int], list[float]]] = field(default_factory=list)
    """Tokens and confidences of every denoising forward, over the block."""


def plain_take(
    rule: DecodeRule,
    ids: list[int],
    holes: list[int],
    prompt: list[int],
    tokens: list[int],
    conf: list[float],
    step: int,
) -> set[int]:
    """Positions in the block that take their token. ``holes`` (masked) and ``prompt`` (prompt) are positions too."""
    size = len(ids)
    by_confidence = sorted(holes, key=lambda i: (-conf[i], i))
    share = 0
    if isinstance(rule, Static | Dynamic | Sequential):
        share = size // rule.steps + (1 if step < size % rule.steps else 0)
    if isinstance(rule, Static):
        return set(by_confidence[:share])
    if isinstance(rule, Sequential):
        return set(sorted(holes)[:share])
    if isinstance(rule, Dynamic):
        confident = {i for i in holes if conf[i] > rule.threshold}
        return confident if len(confident) >= share else set(by_confidence[:share])
    if isinstance(rule, SubBlocks):
        part = min(holes) // rule.length
        by_confidence = [i for i in by_confidence if i // rule.length == part]
        return {i for i in by_confidence if conf[i] > rule.threshold} | {by_confidence[0]}
    assert isinstance(rule, LowConfidence | JointThreshold)
    taken = {i for i in holes if conf[i] > rule.threshold} or set(by_confidence[:1])
    if isinstance(rule, JointThreshold):
        written = set(range(size)) - set(holes) - set(prompt)
        taken |= {i for i in written if conf[i] > rule.edit_threshold and tokens[i] != ids[i]}
    return taken


@torch.inference_mode()
def plain_run(
    model: PackedModel[BlockConfig],
    prompt: list[int],
    gen_length: int,
    rule: DecodeRule,
    block: int,
    logits: Logits = masked_logits,
) -> Plain:
    """Decode whole blocks until there are ``gen_length`` tokens; nothing stops it earlier."""
    config, result = model.config, Plain()
    aligned = len(prompt) // block * block
    final, opening = list(prompt[:aligned]), list(prompt[aligned:])
    while len(final) < len(prompt) + gen_length:
        if config.shifts_logits and not opening and final:
            row = logits(model, final, block)[-1]
            row[config.mask_token_id] = -torch.inf
            opening = [int(row.argmax())]
        ids = opening + [0] * (block - len(opening))
        given = list(range(len(opening)))
        holes = [i for i in range(block) if i not in given]
        step = post_steps = 0
        while True:
            shown = [config.mask_token_id if i in holes else ids[i] for i in range(block)]
            rows = logits(model, final + shown, block)
            if config.shifts_logits:
                rows = torch.cat((rows[:1], rows[:-1]))
            rows = rows[-block:]
            conf = rows.softmax(-1)
            rows[:, config.mask_token_id] = -torch.inf
            tokens = rows.argmax(-1)
            confidence = conf.gather(1, tokens[:, None])[:, 0].tolist()
            result.trace.append((tokens.tolist(), confidence))
            taken = plain_take(rule, ids, holes, given, tokens.tolist(), confidence, step)
            post_steps += not holes
            for i in taken:
                ids[i] = int(tokens[i])
            holes = [i for i in holes if i not in taken]
            step += 1
            result.denoised += 1
            if holes:
                continue
            if not isinstance(rule, JointThreshold) or not taken or post_steps >= rule.max_post_steps:
                result.sglang_forwards += step + 1 + (isinstance(rule, JointThreshold) and bool(taken))
                break
        final, opening = final + ids, []
    result.ids = final[len(prompt) :]
    return result


# -- cases ------------------------------------------------------------------------------------------------

FOLDER_VARIABLE = "REPRO_BLOCK_GOLDENS"
NEAR = 1e-3
"""A case may differ if the authors' run came this near to a threshold."""
_LONGEST = 512
"""Most tokens of a case."""


@dataclass(frozen=True, kw_only=True)
class BlockCase:
    id: str
    method: str
    checkpoint: Path
    block: int
    prompt: tuple[int, ...]
    gen_length: int
    rule: DecodeRule
    expected: tuple[int, ...]
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counts of the authors' run, by the fields of ``BlockAnswer`` that sum to them, joined by +."""
    sampling: BlockSampling = field(default_factory=BlockSampling)
    stop_ids: frozenset[int] = frozenset()
    exits_early: bool = False
    cut_at: int | None = None
    """If set, answers are compared only up to this id, because the engine continues after it."""
    required: bool = True
    tie_sensitive: bool = False

    def request(self, number: int = 0) -> BlockRequest:
        return BlockRequest(
            request_id=number,
            prompt_ids=self.prompt,
            gen_length=self.gen_length,
            rule=self.rule,
            sampling=self.sampling,
            stop_ids=self.stop_ids,
            exits_early=self.exits_early,
        )


@dataclass(frozen=True, kw_only=True)
class BlockResult:
    case: BlockCase
    answer: BlockAnswer

    @property
    def difference(self) -> str | None:
        """The first difference from the record, in words; None if there is none."""
        ids = list(self.answer.ids)
        if self.case.cut_at in ids:
            ids = ids[: ids.index(self.case.cut_at) + 1]
        if (difference := other_ids(ids, self.case.expected)) is not None:
            return difference
        for names, wanted in self.case.counts.items():
            count = sum(getattr(self.answer, name) for name in names.split("+"))
            if count != wanted:
                return f"{count} {names}, recorded {wanted}"
        return None

    @property
    def passed(self) -> bool:
        return self.difference is None


def block_cases() -> tuple[str, list[BlockCase]]:
    """The origin of the cases, and the cases: the authors' if their folder is named, or else the embedded model's."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        return folder, recorded_cases(Path(folder))
    return "the embedded block-diffusion model and a plain loop", list(embedded_cases())


def verify_blocks(cases: list[BlockCase], *, device: str = "cpu") -> list[BlockResult]:
    """Replay cases in float32. Cases with one checkpoint and block size are served together, which changes no answer."""
    from engines.blockdiffusion.engine import BlockEngine
    from engines.blockdiffusion.executor import TorchBlockExecutor
    from engines.blockdiffusion.scheduler import BlockEngineConfig

    results: dict[int, BlockResult] = {}
    for checkpoint, block in dict.fromkeys((case.checkpoint, case.block) for case in cases):
        group = {i: case for i, case in enumerate(cases) if (case.checkpoint, case.block) == (checkpoint, block)}
        executor = TorchBlockExecutor(
            load_checkpoint(checkpoint, device),
            num_slots=len(group),
            max_len=_LONGEST,
            num_tokens=len(group) * _LONGEST,
            block=block,
            prefix_cache=False,  # what it saves would be missing from the counts
        )
        engine = BlockEngine(executor, BlockEngineConfig(max_num_batched_tokens=1024))
        for i, answer in engine.run([case.request(i) for i, case in group.items()]).items():
            results[i] = BlockResult(case=group[i], answer=answer)
        executor.close()
    return [results[i] for i in range(len(cases))]


@cache
def load_checkpoint(checkpoint: Path, device: str = "cpu") -> PackedModel[BlockConfig]:
    from engines.models.loader import load_block

    return load_block(str(checkpoint), device=device)


# ---- the embedded model against a plain loop -----------------------------------------------------------------------------

_RULES: Mapping[str, DecodeRule] = {
    "low-confidence": LowConfidence(threshold=0.9),
    "joint-threshold": JointThreshold(threshold=0.7, edit_threshold=0.5),
    "static": Static(steps=6),
    "dynamic": Dynamic(steps=16, threshold=0.85),
    "sequential": Sequential(steps=8),
    "sub-blocks": SubBlocks(length=8, threshold=0.9),
}


def embedded_cases(count: int = 2) -> Iterator[BlockCase]:
    """Yields ``count`` held-out problems of each task and rule, with the answer of a loop without cache, batch or packing."""
    from repro.families.block.settings import EMBEDDED_TASKS, settings_of_requests
    from repro.families.block.text import text_of
    from repro.tasks.mini import GENERATORS

    settings = settings_of_requests({})
    text, block, length = text_of(settings), settings.block, settings.knobs.gen_length // 2
    for task in EMBEDDED_TASKS:
        for i, problem in enumerate(GENERATORS[task](23, count, "heldout", num_facts=(2, 6), num_distractors=(0, 3))):
            prompt = text.encode(problem.prompt)
            for name, rule in _RULES.items():
                plain = plain_run(load_checkpoint(EMBEDDED_DIRS[EMBEDDED]), list(prompt), length, rule, block)
                yield BlockCase(
                    id=f"{name}-{task}-{i}",
                    method=f"block {name}",
                    checkpoint=EMBEDDED_DIRS[EMBEDDED],
                    block=block,
                    prompt=prompt,
                    gen_length=length,
                    rule=rule,
                    expected=tuple(plain.ids[:length]),
                    counts={"denoised": plain.denoised},
                )


# ---- recorded ones -------------------------------------------------------------------------------------------------------


def recorded_cases(folder: Path) -> list[BlockCase]:
    """All cases of a folder that can be reproduced."""
    cases: list[BlockCase] = []
    for name, read in _READERS.items():
        path = folder / f"{name}_cases.json"
        if not path.is_file():
            raise UserError(f"{FOLDER_VARIABLE}={str(folder)!r} has no {path.name}: give the folder of recorded cases")
        content = json.loads(path.read_text(encoding="utf-8"))
        common = {key: value for key, value in content.items() if key != "cases"}
        for i, case in enumerate(content["cases"]):
            fields = read(folder, common | case)
            if fields is not None:
                cases.append(BlockCase(id=f"{name}-{i}", method=f"block {name}", **fields))
    return cases


def _sglang_case(folder: Path, case: Mapping[str, Any]) -> dict[str, Any]:
    params = case["params"]
    rule: DecodeRule = LowConfidence(threshold=params["thr"])
    if case["algo"] != "LowConfidence":
        rule = JointThreshold(threshold=params["thr"], edit_threshold=params["et"], max_post_steps=params["maxpost"])
    expected = tuple(case["output_full"][len(case["prompt"]) :])
    return {
        **_common_fields(folder, "llada2", case, case["block"]),
        "gen_length": len(expected),
        "rule": rule,
        "expected": expected,
    }


def _llada2_case(folder: Path, case: Mapping[str, Any]) -> dict[str, Any]:
    params, eos_id = case["params"], case["eos_id"]
    is_first, stops_early = case["algo"].startswith("llada2.0"), bool(params.get("eos_early_stop"))
    rule: DecodeRule = (
        Dynamic(steps=params["steps"], threshold=params["threshold"])
        if is_first
        else JointThreshold(
            threshold=params["threshold"],
            edit_threshold=params["editing_threshold"],
            max_post_steps=params["max_post_steps"],
        )
    )
    return {
        **_common_fields(folder, "llada2", case, params["block_length"]),
        "gen_length": params["gen_length"],
        "rule": rule,
        "expected": tuple(case["output"]),
        "counts": {"denoised": case["n_forwards"]},
        # LLaDA 2.1 decodes all blocks unless told to stop early, and then cuts.
        "stop_ids": frozenset([eos_id]) if is_first or stops_early else frozenset(),
        "exits_early": is_first and stops_early,
        "cut_at": eos_id,
        "required": case["min_margin"] >= NEAR,
    }


def _sdar_case(folder: Path, case: Mapping[str, Any]) -> dict[str, Any] | None:
    params = case["params"]
    steps, strategy = params["denoising_steps"], params["remasking_strategy"]
    rules: dict[str, Callable[[], DecodeRule]] = {
        "sequential": lambda: Sequential(steps=steps),
        "low_confidence_static": lambda: Static(steps=steps),
        "low_confidence_dynamic": lambda: Dynamic(steps=steps, threshold=params.get("confidence_threshold", 0.85)),
    }
    if case["error"] is not None or not case["prompt_preserved"] or strategy not in rules:
        return None
    output = case["output_full"][len(case["prompt"]) :]
    # The script finishes the block of a stop token, and leaves masks in the blocks after it.
    ends = params.get("stopping_criteria_idx")
    stop_ids = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
    end = next((index for index, token in enumerate(output) if token in stop_ids), len(output))
    return {
        **_common_fields(folder, "sdar", case, params["block_length"]),
        "gen_length": len(output),
        "rule": rules[strategy](),
        "expected": tuple(output[: end + 1]),
        "stop_ids": stop_ids,
        "counts": {"denoised": case["n_forwards"] - case["n_store"]},
        "sampling": BlockSampling(
            temperature=params.get("temperature", 1.0),
            top_k=params.get("top_k") or None,
            top_p=params.get("top_p") or 1.0,
            draws=False,
        ),
    }


def _fast_dllm_v2_case(folder: Path, case: Mapping[str, Any]) -> dict[str, Any] | None:
    params, prompt, stop_id = case["params"], case["prompt"], case["params"]["stop_token"]
    if case["error"] is not None or len(prompt) == params["block_size"]:
        return None
    expected = case["output_full"][len(prompt) :]
    # A denoised stop token ends the answer, and padding follows. A stop token from a commit does not end it.
    has_end = stop_id in expected[:-1] and not any(expected[expected.index(stop_id) + 1 :])
    expected = tuple(expected[: expected.index(stop_id) + 1] if has_end else expected)
    prefills = int(len(prompt) >= params["block_size"])
    return {
        **_common_fields(folder, "fastdllm2", case, params["block_size"]),
        "gen_length": params["max_new_tokens"] if has_end else len(expected),
        "rule": SubBlocks(
            length=params["small_block_size"], threshold=params["threshold"], dual_cache=params["use_block_cache"]
        ),
        "expected": expected,
        "counts": {"denoised+committed": case["n_forwards"] - prefills, "rows": case["rows"]},
        "stop_ids": frozenset([stop_id] if has_end else []),
    }


def _common_fields(folder: Path, model: str, case: Mapping[str, Any], block: int) -> dict[str, Any]:
    return {"checkpoint": folder / f"{model}_tiny", "block": block, "prompt": tuple(case["prompt"])}


_READERS: Mapping[str, Callable[[Path, Mapping[str, Any]], dict[str, Any] | None]] = {
    "block_engine": _sglang_case,
    "llada2": _llada2_case,
    "sdar": _sdar_case,
    "fastdllm2": _fast_dllm_v2_case,
}
