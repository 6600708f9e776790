"""What travels to a GPU for a step, with and without a graph."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from quire.ops.gpu.batch import GpuBatch
from quire.ops.gpu.cache import GpuCache
from quire.ops.gpu.graph_inputs import GraphInputs
from quire.ops.gpu.graph_sizes import chain_graph_sizes, drop_slower_sizes
from quire.ops.gpu.hidden_states import GpuHiddenStates
from quire.ops.gpu.program import GpuProgram
from quire.ops.kv_spec import KVSpec
from quire.ops.opset import StepBatch

CPU = torch.device("cpu")
BLOCK = 16


def step(counts: list[int], contexts: list[int]) -> StepBatch:
    """Sequences that have so many tokens in this step, of contexts so long."""
    starts = np.cumsum([0, *counts], dtype=np.int32)
    width = -(-max(contexts) // BLOCK)
    make = np.random.default_rng(sum(counts))
    return StepBatch(
        ids=make.integers(0, 100, starts[-1]).astype(np.int32),
        positions=np.concatenate([np.arange(c - n, c, dtype=np.int32) for n, c in zip(counts, contexts, strict=True)]),
        slots=make.integers(0, 99, starts[-1]).astype(np.int32),
        seq_starts=starts,
        context_lens=np.array(contexts, np.int32),
        block_tables=make.integers(0, 9, (len(counts), width)).astype(np.int32),
        logit_rows=starts[1:] - 1,
    )


def program(max_drafts: int = 0, tree_nodes: int = 0) -> GpuProgram:
    cache = GpuCache(KVSpec(1, 1, 16, BLOCK, "float32"), 9, 0, CPU)
    return GpuProgram(lambda batch: batch.slots, cache, 64, 5, 300, max_drafts=max_drafts, tree_nodes=tree_nodes)


@dataclass
class Captured:
    inputs: GraphInputs


def arrays(batch: GpuBatch) -> list[torch.Tensor]:
    runs = batch.runs
    return [batch.ids.ids, batch.positions, batch.slots, batch.logit_rows, *(runs.seq_starts, runs.context_lens)]


def check_alignment(batch: GpuBatch) -> None:
    """Whatever the step holds, arrays begin and lines are as far apart as kernels were compiled for."""
    tables = batch.runs.block_tables
    assert not any(array.storage_offset() % 16 for array in (*arrays(batch), tables))
    assert tables.stride() == (-(-tables.shape[1] // 16) * 16, 1)


def test_a_step_arrives_as_it_was_sent():
    for counts, contexts in (([1, 7, 3], [20, 7, 90]), ([1], [1]), ([5], [300])):
        sent = step(counts, contexts)
        batch = program()._on_device(sent)
        check_alignment(batch)
        names = ("ids", "positions", "slots", "logit_rows", "seq_starts", "context_lens")
        for name, array in zip(names, arrays(batch), strict=True):
            assert array.tolist() == getattr(sent, name).tolist()
        used = sent.block_tables.shape[1]
        assert batch.runs.block_tables[:, :used].tolist() == sent.block_tables.tolist()
        assert (batch.decodes, batch.prefills) == (1 in counts, max(counts) > 1)


def test_a_graphs_arrays_are_padded():
    made = program()
    inputs = GraphInputs(11, 4, made._width, CPU, decodes=False)
    inputs.send(step([4, 1, 2, 1], [40, 9, 2, 3]))  # what it leaves behind must not be seen
    sent = step([5, 1], [70, 33])
    inputs.send(sent)
    batch = made._batch_from(inputs, with_adapters=False)
    check_alignment(batch)
    assert batch.decodes and batch.prefills and not batch.all_logits
    assert batch.ids.ids[:6].tolist() == sent.ids.tolist() and batch.positions[:6].tolist() == sent.positions.tolist()
    assert batch.slots.tolist() == [*sent.slots, *[-1] * 5]
    assert batch.runs.seq_starts.tolist() == [0, 5, 6, 6, 6] and batch.runs.context_lens.tolist() == [70, 33, 0, 0]
    assert batch.logit_rows.tolist() == [4, 5, 0, 0]
    assert batch.runs.block_tables[:2, :5].tolist() == sent.block_tables.tolist()


def test_a_graph_that_decodes_has_one_token_a_sequence():
    made = program()
    inputs = GraphInputs(4, 4, made._width, CPU, decodes=True)
    for contexts in ([50, 3, 17], [4]):
        sent = step([1] * len(contexts), contexts)
        inputs.send(sent)
        batch = made._batch_from(inputs, with_adapters=False)
        check_alignment(batch)
        assert batch.only_decodes and batch.all_logits
        assert batch.runs.seq_starts.tolist() == [0, 1, 2, 3, 4]
        assert batch.slots.tolist() == [*sent.slots, *[-1] * (4 - len(contexts))]
        assert batch.runs.context_lens.tolist() == [*contexts, *[0] * (4 - len(contexts))]


def test_a_graph_that_verifies_chains_decodes_a_few_tokens_a_sequence():
    made = program(max_drafts=2)
    inputs = {one.num_tokens: one for one in made._chain_inputs(5)}
    assert list(inputs) == [2, 4, 8, 16, 24]  # five sequences have up to 20 tokens
    sent = replace(step([3, 1], [50, 3]), logit_rows=np.arange(4, dtype=np.int32))
    inputs[8].send(sent)
    batch = made._batch_from(inputs[8], with_adapters=False)
    check_alignment(batch)
    assert batch.decodes and not batch.prefills and not batch.only_decodes and batch.all_logits
    assert batch.max_queries == 4 and batch.ancestors is None
    assert batch.runs.seq_starts.tolist() == [0, 3, 4, 4, 4, 4]
    assert batch.runs.context_lens.tolist() == [50, 3, 0, 0, 0]


def test_what_verifies_chains_has_graphs_of_its_own():
    made = program(max_drafts=3)
    made._chain_graphs = {one.num_tokens: Captured(one) for one in made._chain_inputs(5)}
    made._prefill_graphs = {16: Captured(made._prefill_inputs(16, 5))}

    def size_for(*counts: int, all_logits: bool = True) -> tuple[int, bool]:
        batch = step([*counts], [9] * len(counts))
        if all_logits:
            batch = replace(batch, logit_rows=np.arange(sum(counts), dtype=np.int32))
        graph = made._graph_for(batch)
        return graph.inputs.num_tokens, graph.inputs.chains

    assert size_for(4) == (4, True)
    assert size_for(4, 1, 1) == (8, True)
    assert size_for(5) == (16, False)  # as many as no chain of three drafts has
    assert size_for(4, 1, all_logits=False) == (16, False)  # a prompt, perhaps
    assert program()._chain_inputs(5) == []


def test_what_verifies_trees_alone_has_graphs_of_its_own():
    """Beside a prompt, trees are in the others."""
    made = program(tree_nodes=7)
    made._lone_tree_graphs = {one.num_tokens: Captured(one) for one in made._lone_tree_inputs(5)}
    made._tree_graphs = {64: Captured(GraphInputs(64, 5, made._width, CPU, False, max_queries=8, num_rows=64))}
    assert list(made._lone_tree_graphs) == [8, 16, 32]

    def batch_of(*counts: int) -> StepBatch:
        words = np.concatenate([[1, 3, 5, 9, 17, 33, 65, 129, 257][:count] for count in counts]).astype(np.int64)
        rows = np.arange(len(words), dtype=np.int32)
        return replace(step([*counts], [9] * len(counts)), logit_rows=rows, ancestors=words)

    def size_for(batch: StepBatch) -> int:
        return made._graph_for(batch).inputs.num_tokens

    assert size_for(batch_of(8)) == 8 and size_for(batch_of(8, 1)) == 16
    assert size_for(batch_of(*[8] * 5)) == 64
    assert size_for(replace(batch_of(8, 1), logit_rows=np.arange(8, dtype=np.int32))) == 64
    inputs, sent = made._lone_tree_graphs[16].inputs, batch_of(6, 1)
    inputs.send(sent)
    batch = made._batch_from(inputs, with_adapters=False)
    check_alignment(batch)
    assert batch.decodes and not batch.prefills and batch.all_logits and batch.max_queries == 8
    assert batch.ancestors.tolist()[:7] == sent.ancestors.tolist()
    assert batch.runs.seq_starts.tolist() == [0, 6, 7, 7, 7, 7]
    assert program()._lone_tree_inputs(5) == []


def test_sizes_of_chains_end_where_steps_do():
    assert chain_graph_sizes(4) == [2, 4]
    assert chain_graph_sizes(5) == [2, 4, 8]
    assert chain_graph_sizes(1000)[-2:] == [896, 1024]


def test_a_graph_reads_the_hidden_states_of_its_tokens():
    states = GpuHiddenStates(torch.arange(12.0).view(6, 2))
    cache = GpuCache(KVSpec(1, 1, 16, BLOCK, "float32"), 9, 0, CPU)
    made = GpuProgram(lambda batch: batch.hidden, cache, 64, 5, 300, hidden=states)
    inputs = GraphInputs(4, 4, made._width, CPU, decodes=False)
    sent = replace(step([2, 1], [9, 3]), hidden_rows=np.array([5, 0, 3], np.int32))
    inputs.send(sent)
    assert made._batch_from(inputs, with_adapters=False).hidden.tolist() == [[10, 11], [0, 1], [6, 7], [0, 1]]
    assert made.run(sent).tolist() == [[10, 11], [0, 1], [6, 7]]


def test_sizes_that_a_larger_one_outruns_are_left_out():
    assert drop_slower_sizes({512: 9.3, 448: 12.7, 384: 7.4, 320: 7.5, 256: 7.7, 1: 4.0}) == [1, 320, 384, 512]
