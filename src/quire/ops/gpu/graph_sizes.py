"""The sizes of steps that CUDA graphs are captured for."""

import math

MAX_CAPTURED_SEQS = 512  # larger steps keep the GPU busy while the next ops are launched
PREFILL_GRAPH_SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)  # tokens
TREE_GRAPH_SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # tokens
# Tokens: drafts of up to 256 sequences. A step is padded by little, since most of it is bound by its matmuls.
CHAIN_GRAPH_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
MAX_SLOWDOWN = 1.03  # times the milliseconds of a larger size: a size within it keeps its graph, as times vary


def decode_graph_sizes(max_size: int) -> list[int]:
    """1, 2, 4, 8, then every 8 up to 64, every 16 up to 256, every 32: a step is padded by little."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, MAX_CAPTURED_SEQS + 1, 32)]
    return sorted({min(size, max_size) for size in sizes})


def tree_graph_sizes(tree_nodes: int, max_size: int) -> list[int]:
    """The sizes of graphs for trees: those of decoding, and what whole trees of 1, 2, 4, 8 and 16 sequences have, up to
    a multiple of 16."""
    whole = [-(-(1 + tree_nodes) * count // 16) * 16 for count in (1, 2, 4, 8, 16)]
    return sorted({size for size in (*TREE_GRAPH_SIZES, *whole) if size <= max_size})


def lone_tree_graph_sizes(tree_nodes: int, max_size: int) -> list[int]:
    """The sizes of graphs for trees and nothing else: of whole trees of 1, 2 and 4 sequences, up to a multiple of 8."""
    sizes = {-(-(1 + tree_nodes) * count // 8) * 8 for count in (1, 2, 4)}
    return sorted({size for size in sizes if size <= max_size})


def chain_graph_sizes(max_size: int) -> list[int]:
    """Up to the first that holds a step of `max_size` tokens."""
    return [
        size for size, smaller in zip(CHAIN_GRAPH_SIZES, (0, *CHAIN_GRAPH_SIZES), strict=False) if smaller < max_size
    ]


def drop_slower_sizes(times: dict[int, float]) -> list[int]:
    """The sizes, ascending, that are not slower than a larger one. (cuBLAS may take longer for 448 rows than for
    512.)"""
    kept, best = [], math.inf
    for size in sorted(times, reverse=True):
        if times[size] < MAX_SLOWDOWN * best:
            kept.append(size)
        best = min(best, times[size])
    return kept[::-1]
