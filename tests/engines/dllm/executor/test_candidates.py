"""The masked places of every block, padded to the rows a GEMM is given at least, and their random numbers."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.step_cases import Resident, Step, step_of
from support.tiny_models import GQA

from engines.dllm.executor.output import CandidateChoice
from engines.dllm.executor.rows import BlockRows, ItemTable, PackedRows
from engines.dllm.executor.step import Block, Candidates, StepLayout
from engines.dllm.phase import Phase
from engines.runtime.noise import row_keys


def chosen_of(step: Step) -> tuple[CandidateChoice, Block, Candidates]:
    table = ItemTable.of(step.items, step.state.slots(step.items))
    packed = PackedRows.of(table, None, width=step.state.width, least=8)
    places = BlockRows.of(table, packed.base, width=step.state.width, shifts_logits=False)
    padding = None if places.inside is None else ~torch.from_numpy(places.inside)
    position, row, flat, slot = step.staging.send(places.position, places.packed, places.flat, table.slot)
    block = Block(position, row, flat, padding, slot)
    choice = CandidateChoice(step.state, step.staging, vocab_size=GQA.vocab)
    layout = StepLayout(num_rows=packed.num_rows, rows=None, block=block, every=None)
    return choice, block, choice.of(step.items, layout, step.state.block_tokens(block))


residents = st.integers(1, 12).flatmap(
    lambda length: st.builds(
        Resident,
        phase=st.just(Phase.REUSE),
        prompt_len=st.integers(1, 9),
        block_length=st.just(length),
        committed=st.integers(0, length - 1),
    )
)


@given(st.lists(residents, min_size=1, max_size=4))
def test_they_are_the_masked_places(found):
    step = step_of(found)
    _, block, chosen = chosen_of(step)
    wanted = [
        (i, item.block_end - 1 - n) for i, item in enumerate(step.items) for n in reversed(range(item.masks_left))
    ]
    positions = block.positions.take(chosen.cell).tolist()
    assert list(zip(chosen.item.tolist(), positions, strict=True))[: chosen.size] == wanted
    assert chosen.size == len(wanted)
    assert len(chosen.row) == len(chosen.cell) == len(chosen.item) == max(8, len(wanted))
    assert torch.equal(chosen.row, block.packed.take(chosen.cell))


def test_random_numbers_are_those_of_the_request_its_step_and_the_position():
    found = [
        Resident(phase=Phase.REUSE, prompt_len=3),
        Resident(phase=Phase.REUSE, prompt_len=5, generation={"temperature": 0.7, "seed": 9, "top_k": 2}),
    ]
    step = step_of(found)
    choice, block, chosen = chosen_of(step)
    step.state.next_draws(step.items[1:])
    sampling = choice.sampling(step.items, chosen, block)
    assert sampling is not None
    assert sampling.temperature.tolist() == [0.0] * 4 + [0.7] * 4
    assert sampling.top_k is not None
    assert sampling.top_k.tolist() == [GQA.vocab] * 4 + [2] * 4
    assert sampling.alg_temp is None
    seed, draw, position = torch.tensor([9] * 4), torch.tensor([1] * 4), torch.arange(5, 9)
    assert torch.equal(sampling.keys[4:], row_keys(seed, draw, position))


def test_nothing_is_drawn_where_nobody_asked():
    step = step_of([Resident(phase=Phase.REUSE)])
    choice, block, chosen = chosen_of(step)
    assert choice.sampling(step.items, chosen, block) is None
    assert step.state.next_draws(step.items) == [0]
