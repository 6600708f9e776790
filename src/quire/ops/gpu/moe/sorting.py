# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Routes sorted by expert into tiles, the last of an expert padded. Only the device knows how many tiles there are.

Few routes are counted and placed by one kernel, a program for each expert, which reads all of them. Many are counted in
parts by a first kernel; each program of a second one then knows where the routes of its part go."""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.overlap import overlap_options, wait_for_inputs

SORT_BLOCK = 1024  # routes at a time
MIN_TILE = 16
MIN_PARTS_ROUTES = 8192  # fewer are sorted by one kernel
SMALL_PART, LARGE_PART = 256, 512  # routes that one program places
MAX_SMALL_PARTS = 128
SUBPART = 128  # routes that are compared with each other at once
COUNTS_BLOCK = 16  # parts whose counts are read at once
TILES_AT_ONCE = tl.constexpr(16)  # whose experts a program finds


class RoutedTokens(NamedTuple):
    """Routes sorted by expert into tiles."""

    routes: Tensor  # [tiles * block] int32; padding is num_routes
    tile_experts: Tensor  # [tiles] int32; no number of an expert: the tile has no routes, or those of other devices
    num_routes: int
    block: int


def by_route(expert_ids: Tensor) -> RoutedTokens:
    """A tile for each route, whatever its expert."""
    num_routes = expert_ids.numel()
    return RoutedTokens(_alone(num_routes, expert_ids.device), expert_ids.flatten(), num_routes, MIN_TILE)


@cache
def _alone(num_routes: int, device: torch.device) -> Tensor:
    """Not made while a graph is captured: forward passes are tried out before."""
    routes = torch.full((num_routes, MIN_TILE), num_routes, dtype=torch.int32, device=device)
    routes[:, 0] = torch.arange(num_routes)
    return routes.flatten()


def sort_by_expert(expert_ids: Tensor, num_experts: int, block: int, overlap: bool = False) -> RoutedTokens:
    num_routes = expert_ids.numel()
    num_tiles = -(-num_routes // block) + min(num_experts, num_routes)  # at most
    routes = torch.empty(num_tiles * block, dtype=torch.int32, device=expert_ids.device)
    tile_experts = torch.empty(num_tiles, dtype=torch.int32, device=expert_ids.device)
    ids, sizes = expert_ids.contiguous(), (num_routes, num_tiles, num_experts)
    tile = {"TILE": block, "BINS": triton.next_power_of_2(num_experts + 1)}
    options = {"OVERLAP": overlap, **overlap_options(overlap)}
    if num_routes < MIN_PARTS_ROUTES:
        size = min(SORT_BLOCK, max(int(triton.next_power_of_2(num_routes)), 16))
        _sort_kernel[(num_experts + 1,)](ids, routes, tile_experts, *sizes, **tile, BLOCK=size, **options)
        return RoutedTokens(routes, tile_experts, num_routes, block)
    part = SMALL_PART if num_routes <= MAX_SMALL_PARTS * SMALL_PART else LARGE_PART
    parts = triton.cdiv(num_routes, part)
    counts = torch.empty(parts, tile["BINS"], dtype=torch.int32, device=ids.device)
    _count_kernel[(parts,)](ids, counts, num_routes, num_experts, BINS=tile["BINS"], PART=part, **options)
    _place_kernel[(parts,)](
        ids,
        counts,
        routes,
        tile_experts,
        *sizes,
        parts,
        **tile,
        PART=part,
        SUBPART=SUBPART,
        PARTS=COUNTS_BLOCK,
        num_warps=8,
        **options,
    )
    return RoutedTokens(routes, tile_experts, num_routes, block)


@triton.jit
def find_tile(number, num_tiles, columns, TILES_A_GROUP: tl.constexpr):
    """-> the tile of a grouped GEMM that program `number` computes, and which of the columns of outputs. So many tiles
    take the same weights one after the other, while the L2 cache holds them."""
    group = number // (TILES_A_GROUP * columns)
    tiles = tl.minimum(num_tiles - group * TILES_A_GROUP, TILES_A_GROUP)
    inside_group = number % (TILES_A_GROUP * columns)
    return group * TILES_A_GROUP + inside_group % tiles, inside_group // tiles


@triton.jit
def _load_ids(id_ptr, routes, num_routes, num_experts):
    """Routes of other devices have a bin of their own, and so has what is no route."""
    ids = tl.load(id_ptr + routes, mask=routes < num_routes, other=-1)
    return tl.where((ids >= 0) & (ids < num_experts), ids, num_experts).to(tl.int32)


@triton.jit(do_not_specialize=["num_routes", "num_tiles"])
def _sort_kernel(
    id_ptr,
    route_ptr,
    tile_expert_ptr,
    num_routes,
    num_tiles,
    num_experts,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program e writes the tiles of expert e, after those of the experts before it; the last one ends the list."""
    wait_for_inputs(OVERLAP)
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, num_routes, BLOCK):
        counts += tl.histogram(_load_ids(id_ptr, first + tl.arange(0, BLOCK), num_routes, num_experts), BINS)
    tiles = tl.where(bins < num_experts, (counts + TILE - 1) // TILE, 0)
    first_tile = tl.sum(tl.where(bins < expert, tiles, 0), axis=0)

    if expert == num_experts:
        for first in range(first_tile, num_tiles, BLOCK):
            tile = first + tl.arange(0, BLOCK)
            tl.store(tile_expert_ptr + tile, -1, mask=tile < num_tiles)
    else:
        count = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
        last_tile = first_tile + (count + TILE - 1) // TILE
        for first in range(first_tile, last_tile, BLOCK):
            tile = first + tl.arange(0, BLOCK)
            tl.store(tile_expert_ptr + tile, expert, mask=tile < last_tile)
        next_slot = first_tile * TILE
        for first in range(0, num_routes, BLOCK):
            route = first + tl.arange(0, BLOCK)
            mine = tl.load(id_ptr + route, mask=route < num_routes, other=-1) == expert
            rank = tl.cumsum(mine.to(tl.int32), axis=0)
            tl.store(route_ptr + next_slot + rank - 1, route, mask=mine)
            next_slot += tl.sum(mine.to(tl.int32), axis=0)
        padding = next_slot + tl.arange(0, TILE)
        tl.store(route_ptr + padding, num_routes, mask=padding < last_tile * TILE)


@triton.jit(do_not_specialize=["num_routes"])
def _count_kernel(
    id_ptr, count_ptr, num_routes, num_experts, BINS: tl.constexpr, PART: tl.constexpr, OVERLAP: tl.constexpr
):
    """counts [parts, BINS]"""
    wait_for_inputs(OVERLAP)
    part = tl.program_id(0)
    ids = _load_ids(id_ptr, part * PART + tl.arange(0, PART), num_routes, num_experts)
    tl.store(count_ptr + part * BINS + tl.arange(0, BINS), tl.histogram(ids, BINS))


@triton.jit(do_not_specialize=["num_routes", "num_tiles", "num_parts"])
def _place_kernel(
    id_ptr,
    count_ptr,
    route_ptr,
    tile_expert_ptr,
    num_routes,
    num_tiles,
    num_experts,
    num_parts,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    PART: tl.constexpr,
    SUBPART: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program writes the routes of its part, the padding of some experts, and the experts of some tiles."""
    wait_for_inputs(OVERLAP)
    part = tl.program_id(0)
    bins = tl.arange(0, BINS)
    all_counts = tl.zeros((PARTS, BINS), tl.int32)
    counts_before = tl.zeros((PARTS, BINS), tl.int32)  # in the parts before this one
    for first in range(0, num_parts, PARTS):
        number = first + tl.arange(0, PARTS)[:, None]
        of_parts = tl.load(count_ptr + number * BINS + bins[None, :], mask=number < num_parts, other=0)
        all_counts += of_parts
        counts_before += tl.where(number < part, of_parts, 0)
    counts = tl.sum(all_counts, axis=0)
    tiles = tl.where(bins < num_experts, (counts + TILE - 1) // TILE, 0)
    first_tiles = tl.cumsum(tiles, axis=0) - tiles

    next_slots = first_tiles * TILE + tl.sum(counts_before, axis=0)
    places = tl.arange(0, SUBPART)
    for first in range(part * PART, part * PART + PART, SUBPART):
        ids = _load_ids(id_ptr, first + places, num_routes, num_experts)
        same = (ids[:, None] == ids[None, :]) & (places[None, :] < places[:, None])
        slots = tl.sum(tl.where(ids[:, None] == bins[None, :], next_slots[None, :], 0), axis=1)
        slots += tl.sum(same.to(tl.int32), axis=1)
        tl.store(route_ptr + slots, first + places, mask=ids < num_experts)
        next_slots += tl.histogram(ids, BINS)

    for expert in range(part, num_experts, num_parts):
        end = tl.sum(tl.where(bins == expert, first_tiles * TILE + counts, 0), axis=0)
        last = tl.sum(tl.where(bins == expert, (first_tiles + tiles) * TILE, 0), axis=0)
        padding = end + tl.arange(0, TILE)
        tl.store(route_ptr + padding, num_routes, mask=padding < last)

    all_tiles = tl.sum(tiles, axis=0)
    for first in range(part * TILES_AT_ONCE, num_tiles, num_parts * TILES_AT_ONCE):
        tile = first + tl.arange(0, TILES_AT_ONCE)
        # Of experts that begin at the same tile, all but the last have none.
        begun = ((first_tiles[None, :] <= tile[:, None]) & (bins < num_experts)[None, :]).to(tl.int32)
        experts = tl.where(tile < all_tiles, tl.sum(begun, axis=1) - 1, -1)
        tl.store(tile_expert_ptr + tile, experts, mask=tile < num_tiles)
