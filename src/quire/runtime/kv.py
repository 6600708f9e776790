"""How large the KV cache is, and how long a sequence may become."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from quire.core.errors import BadRequest, DoesNotFit, Unsupported
from quire.core.sliding_window import SlidingWindow
from quire.models.config import ModelConfig
from quire.ops.kv_spec import CHECKPOINT_DTYPES, GPU_KV_DTYPES, KVSpec, StateSpec
from quire.runtime.window_pages import with_window_pages

INT8_TOKENS = 16  # kernels take this many tokens of an int8 cache at a time
INT8_MAX_SIZE = 1024  # slots of a block, columns of a head: longer sums would overflow 32 bits
MAX_STAGED_BYTES = 2**30  # of host blocks on the way from and to the disk and other engines
MIN_STAGED_BLOCKS = 16
SLOTS_A_SEQUENCE = 6  # state slots for each sequence that may run, with those for checkpoints
OWN_SLOTS = 2  # of these, its own
MIN_SLOTS = 3
TYPICAL_TOKENS = 4096  # of a prefix, where memory is divided between blocks and slots
SLOTS_A_PREFIX = 3  # the same
SWAPPED_SHARE = 4  # a sequence that is swapped out is taken to have one in so many tokens of the longest
STAGED_SLOTS = 8  # host slots on the way from and to the disk and other engines
MIN_STAGED_SLOTS = 2
GPU_MAX_HEAD_DIM = 512  # columns of a head: larger tiles do not fit a GPU's shared memory


@dataclass(frozen=True, slots=True)
class KVSize:
    spec: KVSpec
    num_blocks: int
    num_host_blocks: int
    max_model_len: int

    @property
    def num_slots(self) -> int:
        return self.spec.states.num_slots if self.spec.states else 0

    @property
    def num_checkpoint_slots(self) -> int:
        return self.spec.states.num_checkpoint_slots if self.spec.states else 0

    @property
    def num_host_slots(self) -> int:
        return self.spec.states.num_host_slots if self.spec.states else 0

    @property
    def num_pages(self) -> int:
        return self.spec.windows.num_pages if self.spec.windows else 0

    @property
    def state_bytes(self) -> int:
        """The bytes of all state slots of the device."""
        if (states := self.spec.states) is None:
            return 0
        return states.num_slots * states.slot_bytes + states.num_checkpoint_slots * states.checkpoint_bytes

    @property
    def cache_bytes(self) -> int:
        return self.num_blocks * self.spec.block_bytes + self.state_bytes + self.num_pages * self.spec.page_bytes


def kv_spec(
    config: ModelConfig,
    block_size: int,
    dtype: str,
    scales: Mapping[int, tuple[float, float]] | None = None,
    checkpoint_dtype: str = "float32",
    drafts: bool = False,
) -> KVSpec:
    """`scales`: the checkpoint's, of an fp8 cache; used if every layer has them. `checkpoint_dtype`: of states.
    `drafts`: whether drafts are verified, which states in blocks cannot take back when they are rejected."""
    if block_size < 1:
        raise BadRequest(f"block_size is {block_size}", "it must be at least 1", param="block_size")
    if dtype == "auto":
        dtype = "float16"
    if dtype not in GPU_KV_DTYPES:
        raise Unsupported(f"kv_cache_dtype is `{dtype}`", f"use one of auto, {', '.join(GPU_KV_DTYPES)}")
    if dtype == "int8":
        _check_int8(config, block_size)
    fp8_scales: tuple[tuple[float, float], ...] = ()
    if scales and dtype == "fp8" and not config.latent and scales.keys() >= {*range(config.kv_layers)}:
        fp8_scales = tuple(scales[layer] for layer in range(config.kv_layers))
    if checkpoint_dtype not in CHECKPOINT_DTYPES:
        names = ", ".join(CHECKPOINT_DTYPES)
        raise Unsupported(f"state_checkpoint_dtype is `{checkpoint_dtype}`", f"use one of {names}")
    conv, states = config.conv, config.states
    if drafts and conv is not None:
        states, conv = conv.in_slots(), None
    if checkpoint_dtype != "float32" and states is None:
        raise Unsupported(
            f"state_checkpoint_dtype is {checkpoint_dtype}, and no layer of this model has a state in slots",
            "leave it out",
        )
    states = replace(states, checkpoint_dtype=checkpoint_dtype) if states else None
    shape = config.kv_layers, config.kv_heads, config.head_dim
    spec = KVSpec(*shape, block_size, dtype, config.latent, fp8_scales, conv, states)
    return replace(spec, index=config.index, compressed=config.compressed)


def _check_int8(config: ModelConfig, block_size: int) -> None:
    if config.latent:
        raise Unsupported("an int8 KV cache of latent vectors", "use kv_cache_dtype float16, or fp8 on a GPU")
    if block_size % INT8_TOKENS or block_size > INT8_MAX_SIZE:
        raise BadRequest(
            f"block_size is {block_size}, and a block of an int8 KV cache holds a multiple of {INT8_TOKENS} tokens",
            f"use {INT8_TOKENS} to {INT8_MAX_SIZE} (16 is usual), or kv_cache_dtype float16",
            param="block_size",
        )
    if config.head_dim > INT8_MAX_SIZE:
        raise Unsupported(
            f"the model's heads have {config.head_dim} columns, and an int8 KV cache takes {INT8_MAX_SIZE}",
            "use kv_cache_dtype float16",
        )


def check_gpu_spec(spec: KVSpec) -> None:
    """Refuse what the GPU's kernels do not support."""
    if spec.block_size & (spec.block_size - 1):
        raise BadRequest(
            f"block_size is {spec.block_size}, and on a GPU it is a power of two", "use 16 or 32", param="block_size"
        )
    if spec.compressed:
        raise Unsupported("compressed attention on a GPU", "use device cpu")
    if spec.head_dim > GPU_MAX_HEAD_DIM and not spec.latent:
        raise Unsupported(
            f"the model's heads have {spec.head_dim} columns, and a GPU takes {GPU_MAX_HEAD_DIM}", "use device cpu"
        )
    if spec.dtype in ("int8", "fp8") and spec.head_dim % 2:
        raise Unsupported(
            f"the model's heads have {spec.head_dim} columns, and a GPU keeps an even number of 8 bits",
            "use kv_cache_dtype auto",
        )


def size_cache(
    config: ModelConfig,
    spec: KVSpec,
    *,
    max_model_len: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    cache_bytes: int | None,
    max_bytes: int,
    swap_bytes: int = 0,
    offload_bytes: int = 0,
    has_staging: bool = False,
    ahead: int = 0,
    window_pages: bool = False,
    has_pinned_host: bool = False,
    draft_block_bytes: int = 0,
) -> KVSize:
    """How many blocks there are, and the longest sequence.

    `cache_bytes` is taken as it is. Without it: what `max_num_seqs` sequences of full length need, but at most
    `max_bytes`. Without `max_model_len` the model's own length is served, or what fits. Where every layer has a
    window, a sequence of any length fits in the blocks of its window and of the tokens of one step. `swap_bytes` and
    `offload_bytes` are host memory; `has_staging`: blocks on their way from and to the disk, or other engines, need
    some, too; `has_pinned_host`: host blocks take their memory at once. With `window_pages`, layers with a window may
    have pages of their own. `draft_block_bytes`: of a block of what drafts, whose cache has as many blocks;
    `cache_bytes` and `max_bytes` are those of both."""
    share = spec.block_bytes / (spec.block_bytes + draft_block_bytes) if draft_block_bytes else 1.0
    cache_bytes, max_bytes = None if cache_bytes is None else int(cache_bytes * share), int(max_bytes * share)
    length = longest(config, max_model_len)
    window = SlidingWindow(config.window, spec.block_size, max_chunk=max_num_batched_tokens, ahead=ahead)
    seq_blocks = window.max_blocks(length)
    seq_bytes = seq_blocks * spec.block_bytes
    is_sized = cache_bytes is None  # by the number and the length of sequences
    if cache_bytes is None:
        cache_bytes = min(max_bytes, max_num_seqs * (seq_bytes + sequence_state_bytes(spec.states)))
    page_bytes = 0  # of all window pages
    if window_pages and spec.block_bytes:
        num_whole, whole_bytes = cache_bytes // spec.block_bytes, spec.block_bytes
        limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens, "ahead": ahead}
        spec = with_window_pages(config, spec, num_whole, max_model_len=length, **limits)
        seq_bytes = seq_blocks * spec.block_bytes
        if spec.windows:
            page_bytes = spec.windows.num_pages * spec.page_bytes
            of_both = cache_bytes * (whole_bytes + draft_block_bytes) // whole_bytes - page_bytes
            cache_bytes = of_both * spec.block_bytes // (spec.block_bytes + draft_block_bytes)
            cache_bytes = min(cache_bytes, max_num_seqs * seq_bytes) if is_sized else cache_bytes
    if spec.states:
        typical_bytes = min(seq_blocks, -(-TYPICAL_TOKENS // spec.block_size)) * spec.block_bytes
        states = _with_slots(spec.states, cache_bytes, seq_bytes, typical_bytes, max_num_seqs)
        spec = replace(spec, states=states)
        cache_bytes -= states.num_slots * states.slot_bytes + states.num_checkpoint_slots * states.checkpoint_bytes
    num_blocks = cache_bytes // spec.block_bytes if spec.block_bytes else max_num_seqs * seq_blocks
    fits = length if num_blocks >= seq_blocks else num_blocks * spec.block_size  # tokens
    if fits <= 0 or (max_model_len is not None and fits < length):
        needed, given = seq_blocks * spec.host_block_bytes, cache_bytes + page_bytes
        raise DoesNotFit(
            f"a sequence of {length} tokens needs {_mib(needed)} of KV cache, and {_mib(given)} hold {fits}",
            f"give kv_cache_memory_bytes {needed}, or ask for a smaller max_model_len",
        )
    spec, num_host_blocks = _size_host(
        spec,
        num_blocks,
        seq_blocks,
        swap_bytes=swap_bytes,
        offload_bytes=offload_bytes,
        has_staging=has_staging and not offload_bytes,
        has_pinned_host=has_pinned_host,
    )
    return KVSize(spec, num_blocks, num_host_blocks, min(length, fits))


def _size_host(
    spec: KVSpec,
    num_blocks: int,
    seq_blocks: int,
    *,
    swap_bytes: int,
    offload_bytes: int,
    has_staging: bool,
    has_pinned_host: bool,
) -> tuple[KVSpec, int]:
    """Host slots of states, which are in the spec, and the number of host blocks, in the memory that is left."""
    host_bytes, seq_bytes = swap_bytes + offload_bytes, seq_blocks * spec.block_bytes
    if spec.states:
        states = _with_host_slots(spec.states, swap_bytes, offload_bytes, seq_bytes, has_staging)
        host_bytes -= _num_host_slots(host_bytes, seq_bytes, states.host_slot_bytes) * states.host_slot_bytes
        spec = replace(spec, states=states)
    free_blocks = num_blocks if host_bytes else 0  # where no layer has keys and values, blocks take no memory
    num_host_blocks = host_bytes // spec.host_block_bytes if spec.block_bytes else free_blocks
    if has_staging:
        num_host_blocks += _num_staged(seq_blocks, spec.host_block_bytes if has_pinned_host else spec.block_bytes)
    return spec, num_host_blocks


def _with_host_slots(
    states: StateSpec, swap_bytes: int, offload_bytes: int, seq_bytes: int, has_staging: bool
) -> StateSpec:
    """Slots on the host: a share of its memory, and some on the way from and to the disk."""
    is_small = states.checkpoint_dtype != "float32" and (has_staging or offload_bytes > 0)
    if is_small and swap_bytes:
        raise Unsupported(
            f"swap_space with checkpoints of states in {states.checkpoint_dtype} on the host: running sequences are "
            "swapped in float32",
            "leave out swap_space, or use state_checkpoint_dtype float32",
        )
    states = replace(states, small_host_slots=is_small)
    num_host_slots = _num_host_slots(swap_bytes + offload_bytes, seq_bytes, states.host_slot_bytes)
    if has_staging:
        num_host_slots += max(min(STAGED_SLOTS, MAX_STAGED_BYTES // states.host_slot_bytes), MIN_STAGED_SLOTS)
    return replace(states, num_host_slots=num_host_slots)


def _num_host_slots(host_bytes: int, seq_bytes: int, slot_bytes: int) -> int:
    """Host slots that go with the sequences that there is room for on the host."""
    return host_bytes // (seq_bytes // SWAPPED_SHARE + slot_bytes)


def sequence_state_bytes(states: StateSpec | None) -> int:
    """The bytes of the slots that go with a sequence: `OWN_SLOTS` for its states, the others for checkpoints."""
    if states is None:
        return 0
    return OWN_SLOTS * states.slot_bytes + (SLOTS_A_SEQUENCE - OWN_SLOTS) * states.checkpoint_bytes


def _with_slots(
    states: StateSpec, cache_bytes: int, seq_bytes: int, typical_bytes: int, max_num_seqs: int
) -> StateSpec:
    """Where checkpoints are smaller, running sequences have at most half of the slots that there would be in fp32, and
    checkpoints as many as go with the prefixes of typical length that the rest has room for."""
    num_slots = _num_slots(states, cache_bytes, seq_bytes, typical_bytes)
    if states.checkpoint_dtype == "float32":
        return replace(states, num_slots=num_slots)
    own = max(min(MIN_SLOTS * max_num_seqs, num_slots // 2), MIN_SLOTS)
    rest = max(cache_bytes - own * states.slot_bytes, 0)
    typical = SLOTS_A_PREFIX * rest // (typical_bytes + SLOTS_A_PREFIX * states.checkpoint_bytes)
    beside_one = max(rest - seq_bytes, 0) // states.checkpoint_bytes
    return replace(states, num_slots=own, num_checkpoint_slots=max(min(typical, beside_one), 1))


def _num_slots(states: StateSpec, cache_bytes: int, seq_bytes: int, typical_bytes: int) -> int:
    """State slots: as many as go with the prefixes of typical length that the memory has room for, beside the blocks of
    one sequence of full length."""
    per_seq = seq_bytes + SLOTS_A_SEQUENCE * states.slot_bytes
    typical = SLOTS_A_PREFIX * cache_bytes // (typical_bytes + SLOTS_A_PREFIX * states.slot_bytes)
    beside_one = (cache_bytes - seq_bytes) // states.slot_bytes
    num_slots = max(min(typical, beside_one), SLOTS_A_SEQUENCE * cache_bytes // per_seq)
    if MIN_SLOTS * states.slot_bytes > cache_bytes:
        raise DoesNotFit(
            f"the recurrent states of a sequence and of a prefix need {_mib(MIN_SLOTS * states.slot_bytes)}, and "
            f"{_mib(cache_bytes)} are for states, keys and values",
            f"give kv_cache_memory_bytes {per_seq}",
        )
    return max(num_slots, MIN_SLOTS)


def _num_staged(seq_blocks: int, block_bytes: int) -> int:
    """Host blocks on the way from and to the disk: those of two longest sequences, if they are not too large. Few of
    these have a window page at a time: `block_bytes` counts it where it takes memory without being written."""
    most = MAX_STAGED_BYTES // block_bytes if block_bytes else 2 * seq_blocks
    return max(min(2 * seq_blocks, most), MIN_STAGED_BLOCKS)


def longest(config: ModelConfig, asked: int | None) -> int:
    """Tokens of a sequence at most: what is asked for, or the model's own length."""
    if asked is None:
        return config.max_position
    if asked < 1:
        raise BadRequest(f"max_model_len is {asked}", "it must be at least 1", param="max_model_len")
    if asked > config.max_length:
        raise BadRequest(
            f"max_model_len is {asked}, and the model was made for {config.max_length} tokens",
            f"ask for {config.max_length} or less",
            param="max_model_len",
        )
    return asked


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
