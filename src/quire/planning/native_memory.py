"""What an engine on a CPU holds beside weights and KV cache: the buffers of its tape, and pages that are not full.

The sizes are those of native/src/tape.cpp, moe.cpp, lora.cpp and pack.cpp. Memory that is never written takes none, so
a buffer counts as far as the largest step of a load writes it."""

from collections.abc import Iterable, Iterator, Sequence
from operator import add

from quire.ops.kv_spec import KVSpec
from quire.ops.tensors import PackedWeight
from quire.planning.step_counter import StepCounter

HUGE_PAGE = 2 << 20
SHARED_PAGES = 4 * HUGE_PAGE  # smaller matrices share such a range
PANEL_BYTES = 256 << 10  # of a thread, for matmuls of many rows
MATRIX_BYTES = 8 << 10  # Python's objects of a matrix of an adapter
START_BYTES = 1256 << 10  # Python's objects of the first steps, and what the allocator keeps
GROUP = 32  # inputs that are quantized together, in 64 bytes
GROUP_BYTES = 64
TILE_QUERIES, LANES, QUERIES_AT_ONCE = 32, 16, 8  # of attention
SPLIT = 256  # positions of a context that one thread attends to
TILES_PER_THREAD = 4
LIST_BYTES = 48  # of a token in Python's lists: the number, and who refers to it
MAPPED_ENDS = HUGE_PAGE  # a table in a mapped file begins and ends within huge pages


def packed_pages(allocations: Iterable[int]) -> Iterator[int]:
    """Bytes of the pages that hold matrices of these sizes: after the first, after the second, and so on.

    A matrix of at least two huge pages has pages of its own. Smaller ones fill ranges of four huge pages, one after the
    other; one that does not fit in the rest of a range begins another."""
    total, used = 0, SHARED_PAGES
    for nbytes in allocations:
        if nbytes >= 2 * HUGE_PAGE:
            total += nbytes
        else:
            used = 0 if used + nbytes > SHARED_PAGES else used
            before = _whole(used, HUGE_PAGE)
            used += _whole(nbytes, 64)
            total += _whole(used, HUGE_PAGE) - before
        yield total


def weight_pages(allocations: Iterable[int]) -> int:
    """The bytes of the pages that all packed weights take."""
    return max(packed_pages(allocations), default=0)


def loading_peak(allocations: Sequence[int], copies: Sequence[int]) -> int:
    """The most that weights take while they are loaded: those that are packed, and `copies` beside each of them."""
    return max(map(add, packed_pages(allocations), copies), default=0)


def logits_bytes(num_rows: int, vocab: int, drafts: bool) -> int:
    """The buffer, and what the allocator keeps of those for fewer rows, which were freed: more where draft tokens let
    the number of rows vary."""
    logits = 4 * num_rows * vocab
    if logits < 2 * HUGE_PAGE:
        return logits + logits // 4
    kept = logits * 3 // 4 if drafts else min(logits // 4, HUGE_PAGE)
    return _whole(logits, HUGE_PAGE) + kept  # numpy asks for huge pages


def step_buffers(
    step: StepCounter, kv: KVSpec, *, max_tokens: int, num_rows: int, num_drafts: int, context: int, threads: int
) -> int:
    """The buffers of a recorded forward pass, when steps have up to `max_tokens` tokens, in `num_rows` sequences that
    sample."""
    num_logits = min(num_rows * (1 + num_drafts), max_tokens)
    logits = logits_bytes(num_logits, step.vocab, num_drafts > 0)
    groups = GROUP_BYTES * max_tokens * -(-step.integer_inputs // GROUP)
    gathered = 4 * num_logits * step.head_inputs
    partial = TILE_QUERIES * (_whole(kv.value_dim, LANES) + LANES)  # floats
    span = 64 // min(kv.block_size, 64) * (kv.block_size + LANES)
    scratch = TILE_QUERIES * (kv.head_dim + LANES) + 2 * partial + span * (kv.head_dim + 2 * QUERIES_AT_ONCE)
    experts = sum(step.expert_buffers(max_tokens))
    arena = step.written_arena_bytes(max_tokens, num_logits)
    of_threads = threads * (4 * (scratch + TILES_PER_THREAD * partial * -(-context // SPLIT)) + PANEL_BYTES)
    return START_BYTES + arena + logits + groups + gathered + of_threads + experts


def token_bytes(num_rows: int, context: int, block_size: int) -> int:
    """Ids and block tables of `num_rows` sequences, in arrays and in the scheduler's lists."""
    return num_rows * (4 * (context + 1) + 4 * -(-context // block_size) + LIST_BYTES * context)


def adapter_bytes(linears: Sequence[PackedWeight], rank: int, num_loras: int) -> int:
    """LoRA adapters of all linear layers, in 16 bits. Rows are padded to tiles of 16."""
    sizes = []
    for w in linears:
        sizes.append(2 * w.num_inputs * _whole(len(w.layers) * rank, 16))
        sizes += [2 * rank * _whole(layer.num_outputs, 16) for layer in w.layers]
    return weight_pages(num_loras * sizes) + num_loras * len(sizes) * MATRIX_BYTES


def adapter_buffers(linears: Sequence[PackedWeight], rank: int, max_tokens: int) -> int:
    """Inputs, hidden values and outputs of the tokens that have an adapter."""
    inputs = max((w.num_inputs for w in linears), default=0)
    hidden = max((len(w.layers) * rank for w in linears), default=0)
    outputs = max((w.num_outputs for w in linears), default=0)
    return 4 * max_tokens * (inputs + hidden + outputs)


def _whole(count: int, unit: int) -> int:
    return -(-count // unit) * unit
