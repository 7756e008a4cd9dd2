"""The model card, written from the training report alone; ``card.md`` is its text."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def render_card(report: dict[str, Any]) -> str:
    config = report["config"]
    shape = (
        f"{config['n_layers']} layers, width {config['d_model']}, {config['n_heads']} heads of "
        f"{config['d_model'] // config['n_heads']}, SwiGLU {config['mlp_hidden_size']}, vocabulary {report['vocab_size']}, "
        f"{report['parameters']:,} parameters, weights stored in float16"
    )
    stages = "\n".join(
        f"| {stage['until']:.0%} | {_span(stage['num_facts'])} | {_span(stage['num_distractors'])} | {_span(stage['num_used'])} | "
        f"{_span(stage['num_operations'])} | {stage['listing_share']:.0%} | {stage['drill_share']:.0%} | {stage['num_names']} |"
        for stage in config["curriculum"]
    )
    rows = "\n".join(
        f"| {entry['task']} | {entry['block_length']} | {entry['n']} | {entry['exact']:.1%} "
        f"({entry['low']:.1%} to {entry['high']:.1%}) | {entry['strict']:.1%} | {entry['flexible']:.1%} |"
        for entry in report["accuracy"]
    )
    whole, random_block, left = (f"{share:.0%}" for share in config["pattern_shares"])
    figures = config | {"steps": report["steps_done"], "block_lengths": " or ".join(map(str, config["block_lengths"]))}
    text = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    return text.format(
        shape=shape,
        stages=stages,
        rows=rows,
        whole=whole,
        random_block=random_block,
        left=left,
        minutes=f"{report['training_wall_s'] / 60:.1f}",
        evaluation=f"{report['evaluation_wall_s'] / 60:.1f}",
        hardware=report["hardware"],
        torch=report["torch"],
        **figures,
    )


def _span(span: Any) -> str:
    return str(span) if isinstance(span, int) else f"{span[0]} to {span[1]}"
