"""What an engine on a GPU holds beside weights and KV cache: activations, CUDA graphs, the sampler, torch's context.

The sizes are those of ops/gpu/program.py and ops/gpu/sampling; torch's allocator rounds them to its segments."""

from collections.abc import Iterable, Sequence
from math import ceil

from quire.ops.tensors import PackedWeight
from quire.planning.step_counter import StepCounter

MIB = 1 << 20
SMALL, LARGE = MIB, 10 * MIB  # below SMALL, 2 MiB segments are shared; below LARGE, 20 MiB segments; else one each
SMALL_SEGMENT, SHARED_SEGMENT = 2 * MIB, 20 * MIB
# As benchmarks/plan_memory.py has measured them on an H200 with torch 2.11.
CONTEXT_BYTES = 785 * MIB  # of a process beside torch's segments: CUDA's context, cuBLAS, loaded kernels, graphs
WORKSPACE_BYTES = 205 * MIB  # that cuBLAS and kernels allocate through torch
KEPT_PER_LAYER = 6  # rows of the hidden size, of every token of a step, that live until the step ends
GRAPH_NODE_BYTES = 6 << 10  # that a driver keeps for one kernel of a captured graph
KERNELS_PER_LAYER = 9
# As ops/gpu has them.
SAMPLER_ROW_BYTES = 4 * (128 + 2048 + 10) + 8 * 16  # histogram, open tokens and parameters
SMALLEST_TILE = 1024  # tokens of the vocabulary that a program of the sampler takes
PREFILL_GRAPH_SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
MAX_CAPTURED_SEQS = 512


def reserved(allocations: Iterable[int]) -> int:
    """Bytes of the segments that torch takes for tensors of these sizes."""
    total = small = shared = 0
    for nbytes in allocations:
        rounded = _whole(nbytes, 512)
        if rounded < SMALL:
            small += rounded
        elif rounded < LARGE:
            shared += rounded
        else:
            total += _whole(rounded, 2 * MIB)
    return total + _whole(small, SMALL_SEGMENT) + _whole(shared, SHARED_SEGMENT)


def step_bytes(step: StepCounter, max_tokens: int, num_logits: int) -> int:
    """Activations of a step, in 16 bits, and its logits."""
    return step.arena_bytes(max_tokens) // 2 + sum(step.expert_buffers(max_tokens)) // 2 + 2 * num_logits * step.vocab


def kept_bytes(num_layers: int, hidden: int, max_tokens: int) -> int:
    """The bytes that layers leave behind until a step has ended, in 16 bits."""
    return 2 * KEPT_PER_LAYER * num_layers * hidden * max_tokens


def decode_graph_sizes(max_size: int) -> list[int]:
    """The sizes of decode graphs, as in ops/gpu/program.py, which cannot be imported without torch."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, MAX_CAPTURED_SEQS + 1, 32)]
    return sorted({min(size, max_size) for size in sizes})


def graph_bytes(num_layers: int, max_tokens: int, max_rows: int, max_model_len: int, block_size: int) -> int:
    """Inputs of every captured size, on the device, and what the driver keeps of the graphs."""
    width = _whole(ceil(max_model_len / block_size), 16)
    prefill = [(size, min(size, max_rows)) for size in PREFILL_GRAPH_SIZES if size <= max_tokens]
    decode = [(size, size) for size in decode_graph_sizes(min(max_rows, max_tokens))]
    inputs = sum(4 * (4 * tokens + 3 * rows + 1 + rows * width) for tokens, rows in [*prefill, *decode])
    return inputs + (len(prefill) + len(decode)) * num_layers * KERNELS_PER_LAYER * GRAPH_NODE_BYTES


def sampler_bytes(max_rows: int, vocab: int) -> int:
    return max_rows * (3 * 8 * ceil(vocab / SMALLEST_TILE) + SAMPLER_ROW_BYTES)


def slot_bytes(linears: Sequence[PackedWeight], rank: int) -> int:
    """One slot of LoRA adapters in all linear layers, in 16 bits, whatever the rank of the adapter in it."""
    return sum(2 * rank * (len(w.layers) * w.num_inputs + w.num_outputs) for w in linears)


def _whole(count: int, unit: int) -> int:
    return -(-count // unit) * unit
