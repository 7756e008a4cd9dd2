"""One set a layer by attention probabilities, and a layer that keeps every row."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.dllm_cache_cases import dims_of, weights_of
from support.engine_runs import engine_for, rows_of, run_together
from support.reference_samplers import dllm_serve
from support.step_cases import Resident, step_of
from support.tiny_models import GQA, MHA, network, request_on

from engines.dllm.config import EngineConfig, GenerationConfig, SparsityConfig
from engines.dllm.executor.compose import packed_executor
from engines.dllm.executor.rows import BuildRows, ItemTable, PackedRows
from engines.dllm.executor.simulated import step_work
from engines.dllm.executor.step import TorchSelectAndPack
from engines.dllm.phase import Phase
from engines.dllm.plan import StepPlan
from engines.errors import UserError
from engines.kernels.scores import QUERY_ROWS, ContextRows, attended
from engines.runtime.device import PoolTensors

WHOLE = SparsityConfig(selection="attended", retention_ratio=0.3, whole_layer=1)


@settings(max_examples=25)
@given(
    st.sampled_from((MHA, GQA)),
    st.sampled_from(("attended", "head", "uniform")),
    st.sampled_from((None, 0, 1)),
    st.sampled_from((0, 1)),
    st.sampled_from((1, 3)),
    st.integers(1, 25),
    st.integers(0, 99),
)
def test_the_engine_gives_the_ids_of_the_plain_sampler(model, selection, whole_layer, delay, pool, prompt_len, seed):
    lengths = {"gen_length": 14, "block_length": 7, "steps": 14}
    request = request_on(model, 0, prompt_len, GenerationConfig(**lengths), seed=seed)
    sparsity = SparsityConfig(
        selection=selection, retention_ratio=0.3, pool_kernel=pool, refresh_delay=delay, whole_layer=whole_layer
    )
    sampled = dllm_serve(
        weights_of(model),
        dims_of(model),
        request.prompt_ids,
        **lengths,
        selection=selection,
        whole_layer=whole_layer,
        keep_ratio=0.3,
        kernel_size=pool,
        delay_step=delay,
    )
    found = sampled.margins
    if min(found.confidence, found.token) < 1e-5 or found.selection < 1e-6:
        return  # sums in another order may decide otherwise
    config = EngineConfig(max_num_seqs=1, max_model_len=64, sparsity=sparsity)
    engine = engine_for(model, config, rows_of(request, sparsity))
    assert run_together(engine, [(0, request)])[0] == sampled.token_ids


@pytest.mark.parametrize("block", [1, QUERY_ROWS, 2 * QUERY_ROWS + 3])
def test_a_score_is_the_largest_share_any_head_and_row_gives(block):
    random = torch.Generator().manual_seed(block)
    contexts, start = (20, 7), block + 20
    q = torch.randn(start + block + 7, 6, 8, generator=random)
    k = torch.randn(start + block + 7, 2, 8, generator=random)
    runs = [(0, block, contexts[0]), (start, block, contexts[1])]  # a block, then its context behind it
    rows = ContextRows(
        block_rows=torch.stack([first + torch.arange(block) for first, *_ in runs]),
        block_valid=None,
        context_rows=torch.tensor(
            [[first + block + min(j, length - 1) for j in range(max(contexts))] for first, _, length in runs]
        ),
        context_valid=torch.tensor([[j < length for j in range(max(contexts))] for *_, length in runs]),
    )
    found = attended(q, k, rows, [block, block], contexts, kernel=1)
    for i, (first, _, length) in enumerate(runs):
        wanted = torch.zeros(length)
        for head in range(6):
            for row in range(first, first + block):
                logits = k[first : first + block + length, head // 3] @ q[row, head] / 8**0.5
                wanted = torch.maximum(wanted, logits.softmax(0)[block:])
        torch.testing.assert_close(found[i, 0, :length], wanted)
        assert (found[i, 0, length:] == -torch.inf).all()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from((0.1, 0.4, 0.9)), st.integers(0, 99))
def test_heads_share_one_set_of_the_count_that_is_due(prompts, ratio, seed):
    """Keys are numbered by packed row, so the pool says which rows were kept."""
    sparsity = SparsityConfig(selection="attended", retention_ratio=ratio)
    residents = [Resident(prompt_len=each, phase=Phase.BUILD) for each in prompts]
    kept = [sparsity.kept_rows(each.prompt_len + each.block_length) for each in residents]
    step = step_of([replace(each, kept_rows=count) for each, count in zip(residents, kept, strict=True)])
    table = ItemTable.of(step.items, range(len(prompts)))
    packed = PackedRows.of(table, None, width=99, least=0)
    build = BuildRows.of(table, step.items, packed.base)
    pool = PoolTensors.of(network(GQA), step.num_pool_rows, make=torch.zeros)
    random = torch.Generator().manual_seed(seed)
    q = torch.randn(packed.num_rows, GQA.heads, 8, generator=random)
    k = (1 + torch.arange(packed.num_rows)).float()[:, None, None].expand(-1, GQA.kv_heads, 8).contiguous()
    select = TorchSelectAndPack(EngineConfig(sparsity=sparsity), None)
    sent = [torch.from_numpy(array) for array in select.arrays(build)]
    select.pack(build, sent)(pool.k[0], pool.v[0], q, k, k)
    for i, item in enumerate(step.items):
        of_heads = pool.k[0, item.kv_start : item.kv_start + item.kept_rows, :, 0] - 1
        assert (of_heads == of_heads[:, :1]).all()
        chosen = of_heads[:, 0].long().tolist()
        assert len(chosen) == len(set(chosen)) == kept[i]
        block = range(int(packed.base[i]) + item.block_start, int(packed.base[i]) + item.window_end)
        assert all(packed.base[i] <= row < packed.base[i + 1] and row not in block for row in chosen)


def test_rows_and_reads_with_a_whole_layer():
    """Room for every row, and keys of the mean layer: (100 + 31 * 30) / 32 = 32.2 of 100 rows outside the block."""
    assert (WHOLE.kept_rows(100), WHOLE.selected_rows(100), WHOLE.mean_rows(100, 32)) == (100, 30, 33)
    assert WHOLE.mean_rows(100, 1) == 100
    none = replace(WHOLE, whole_layer=None)
    assert none.kept_rows(100) == none.selected_rows(100) == none.mean_rows(100, 32) == 30
    config = EngineConfig(sparsity=WHOLE)
    reuse, build = (
        step_work(StepPlan((Resident(prompt_len=96, kept_rows=100, phase=phase).item(0, 0),), (), 0), config, 32)
        for phase in (Phase.REUSE, Phase.BUILD)
    )
    assert (reuse.query_rows, reuse.attention_pairs, reuse.kv_read_rows, reuse.kv_written_rows) == (4, 4 * 37, 37, 4)
    assert (build.query_rows, build.attention_pairs, build.kv_written_rows) == (104, 104 * 104, 33)


def test_what_has_no_such_layer_is_refused():
    said = "whole_layer=2 is none of the model's layers: give one from 0 to 1"
    config = EngineConfig(sparsity=replace(WHOLE, whole_layer=2))
    with pytest.raises(UserError, match=said):
        packed_executor(network(GQA), config, 50)
