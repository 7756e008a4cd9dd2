"""Help of commands with many options, in panels; plain text, so that ``--help`` loads nothing."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

FEW = 12
"""Options of a command that are one list."""

PANELS = {
    "What is run": "system dataset_name dataset task platform executor component model weights reading prompt prompt_ids chat "
    "system_prompt paper",
    "Workload": "request_rate num_prompts limit num_fewshot arrivals burstiness dataset_path dataset_source input_len seed "
    "num_runs",
    "Engine": "scheduler max_num_batched_tokens max_num_logits max_num_seqs batch_size memory_limit logit_rows "
    "batch_rule attention_backend cuda_graphs fused_kernels tensor_parallel dtype device knob",
    "Decoding": "gen_length block_length steps temperature top_p top_k threshold factor alg alg_temp remasking cfg_scale "
    "cfg_interval stop_at_eos tie_policy compat",
    "Cache": "retention_ratio pool_kernel selection refresh_delay cache prompt_interval gen_interval transfer_ratio",
    "Runs and output": "result_dir out_dir force accept_other_code continue_on_error dry_run profile profile_every plot json "
    "help",
}
_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names.split()}


class PanelCommand(TyperCommand):
    def format_options(self, ctx: Any, formatter: Any) -> None:
        params = self.get_params(ctx)
        if len(params) <= FEW:
            super().format_options(ctx, formatter)
            return
        panels: dict[str, list[Any]] = {panel: [] for panel in ("Arguments", *PANELS, "Others")}
        for param in params:
            record = param.get_help_record(ctx)
            if record is not None:
                is_argument = param.param_type_name == "argument"
                panels["Arguments" if is_argument else _PANEL_OF.get(str(param.name), "Others")].append(record)
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records)
