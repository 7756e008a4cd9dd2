"""Commands whose help names every option whole, in panels where there are many, as plain text, so that ``--help`` loads
nothing; and which refuse an option that would silently win over itself, and a number that nothing can hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand, TyperGroup

from engines.bounds import LEAST, check_count
from engines.errors import UserError

FEW = 12
"""Options of a command that are one list."""
OTHERS = "Options"
"""What is in none of the panels, or alone in one: ``--help``, of commands that write nothing."""

PANELS = {
    "What is run": "system dataset_name dataset task platform executor component model weights reading prompt prompt_ids chat "
    "system_prompt paper trace hardware gpus",
    "Workload": "request_rate num_prompts limit num_fewshot arrivals burstiness dataset_path dataset_source input_len seed "
    "num_runs rate slo_ttft_s slo_itl_s trace_path num_sessions",
    "Server": "url max_concurrency goodput served_model_name host port api_key max_queue request_timeout drain_timeout",
    "Engine": "scheduler max_num_batched_tokens max_num_logits max_num_seqs max_model_len kv_tokens keep_kv batch_size "
    "memory_limit logit_rows batch_rule attention_backend cuda_graphs fused_kernels tensor_parallel dtype device knob "
    "constants method solver",
    "Decoding": "gen_length block_length steps temperature top_p top_k threshold factor alg alg_temp remasking cfg_scale "
    "cfg_interval stop_at_eos tie_policy compat",
    "Cache": "retention_ratio pool_kernel selection refresh_delay cache prompt_interval gen_interval transfer_ratio",
    "Runs and output": "result_dir out_dir pool address jobs force accept_other_code continue_on_error dry_run profile "
    "profile_every plot top json help",
}
_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names.split()}
_UNBROKEN = "\u2011"
"""Stands for a hyphen while lines are broken: a name is not to end in the middle."""


class PanelCommand(TyperCommand):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = _held(self.help or "")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _refuse_repeated(self, ctx, args)
        rest = super().parse_args(ctx, args)
        for name in LEAST.keys() & ctx.params.keys():
            check_count(name, ctx.params[name])
        return rest

    def get_help(self, ctx: Any) -> str:
        return _released(super().get_help(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        shown = [
            (param, record) for param in self.get_params(ctx) if (record := param.get_help_record(ctx)) is not None
        ]
        panels: dict[str, list[Any]] = {panel: [] for panel in ("Arguments", *PANELS, OTHERS)}
        for param, (name, text) in shown:
            panel = OTHERS if len(shown) <= FEW else _PANEL_OF.get(str(param.name), OTHERS)
            panels["Arguments" if param.param_type_name == "argument" else panel].append(
                (name, _held(_told(text, str(ctx.info_name))))
            )
        if [name for name, _ in panels["Runs and output"]] == ["--help"]:
            panels[OTHERS] += panels.pop("Runs and output")
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records)


class WholeGroup(TyperGroup):
    """Lists the whole first sentence of every command's help."""

    def get_help(self, ctx: Any) -> str:
        return _released(super().get_help(ctx))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(10**6)) for name, command in commands if command])


def _refuse_repeated(command: TyperCommand, ctx: Any, args: list[str]) -> None:
    """Of an option that takes one value the library keeps the last, and drops the others without a word."""
    *_, given = command.make_parser(ctx).parse_args(args=list(args))
    options: Iterator[Any] = (each for each in given if each.param_type_name == "option")
    for option in dict.fromkeys(options):
        # Once more the same switch says nothing else; on and off, or two values, do.
        may_come_again = option.multiple or option.count or (option.is_flag and not option.secondary_opts)
        if not may_come_again and (num := given.count(option)) > 1:
            raise UserError(f"{max(option.opts, key=len)} is given {num} times and takes one value: keep one")


def _told(text: str, command: str) -> str:
    """Defaults that the library appends, as those that a help names itself: in its sentence. Those of ``generate``, there
    alone."""
    text = re.sub(r"\.?  (\[[^\[\]]*\])$", r" \1.", text)
    return re.sub(
        r"default: ([^\]]*); (\S+) in generate", r"default: \2" if command == "generate" else r"default: \1", text
    )


def _held(text: str) -> str:
    return text.replace("-", _UNBROKEN)


def _released(text: str) -> str:
    return text.replace(_UNBROKEN, "-")
