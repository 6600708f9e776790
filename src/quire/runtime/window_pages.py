"""Whether layers with a sliding window have pages of their own, and how many."""

from dataclasses import replace

from quire.core.sliding_window import SlidingWindow
from quire.models.config import ModelConfig
from quire.ops.kv_spec import KVSpec, WindowSpec

WINDOWS_A_SEQUENCE = 2  # for each sequence that may run: its own, and one that the prefix cache keeps


def windowed_layers(config: ModelConfig) -> tuple[int, ...]:
    """The layers of the cache that have a window, if others have none; else (). Of compressed attention, all have one:
    what they keep of all positions is in the blocks, as entries."""
    if config.compressed:
        return tuple(range(config.layers))
    windows = config.kv_windows
    if config.has_states or config.latent or all(windows):
        return ()
    return tuple(layer for layer, window in enumerate(windows) if window)


def page_window(config: ModelConfig) -> int:
    """The largest window of a layer."""
    return config.compressed.reach if config.compressed else max(config.kv_windows, default=0)


def page_counts(
    config: ModelConfig, block_size: int, max_num_seqs: int, max_num_batched_tokens: int, ahead: int = 0
) -> tuple[int, int]:
    """-> pages without which sequences would wait for some, and pages with which prefixes are kept, too"""
    window = SlidingWindow(page_window(config), block_size, max_chunk=max_num_batched_tokens, ahead=ahead)
    least = window.num_needed(max_num_seqs, max_num_batched_tokens)
    return least, window.num_needed(WINDOWS_A_SEQUENCE * max_num_seqs, max_num_batched_tokens)


def with_window_pages(
    config: ModelConfig,
    spec: KVSpec,
    num_blocks: int,
    *,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    ahead: int = 0,
) -> KVSpec:
    """Let the layers with a window have pages, if that leaves memory for clearly more blocks than the `num_blocks` that
    there are without. Else `spec` as it is: many short sequences in little memory would be short of pages."""
    layers, size = windowed_layers(config), page_window(config)
    if not layers or max_model_len <= size:
        return spec
    least, enough = page_counts(config, spec.block_size, max_num_seqs, max_num_batched_tokens, ahead)
    if least > num_blocks * 3 // 4:
        return spec
    return replace(spec, windows=WindowSpec(layers, size, min(enough, max(least, num_blocks // 2))))
