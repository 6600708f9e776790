# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""What the warps of mxfp4_tiles.py that multiply do: weights of four bits become bf16 in registers, and the sums of a
tile are finished and stored.

A chunk's weights are made in halves: while the tensor cores multiply one, the next one is made. None is in flight from
one pass of the loop to the next: with registers that are moved between warps, ptxas would wait for each instruction."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from quire.ops.gpu.activation import activate_times
from quire.ops.gpu.linear.e2m1 import plane_pairs
from quire.ops.gpu.linear.wide_planes import side_by_side, words_layout
from quire.ops.gpu.moe.sorting import find_tile

HALF = gl.constexpr(64)  # rows of weights: of 128 of a tile
SCALE = gl.constexpr(2.0**64)  # weights are made times 2**-64


def unpack_half(half: int) -> str:
    """Instructions that make four planes $0 .. $3 of half a chunk from words $4 and $5 and the exponents $6. One of the
    words has them (e2m1.py). Exponents are bytes, of which a register of two bf16 takes every other one."""
    word, group = ("$4", "low") if half == 0 else ("$5", "high")
    lines = [".reg .b32 turned, s, t, p<4>;", ".reg .b16 low, high;", *plane_pairs(word, [f"p{i}" for i in range(4)])]
    for name, shift in (("s", "shl.b32 s, $6, 7;"), ("t", "shr.u32 t, $6, 1;")):
        lines += [shift, f"and.b32 {name}, {name}, 0x7F807F80;", f"mov.b32 {{low, high}}, {name};"]
        lines.append(f"mov.b32 {name}, {{{group},{group}}};")
    lines += [f"mul.rn.bf16x2 ${plane}, p{plane}, {'s' if plane < 2 else 't'};" for plane in range(4)]
    return "{\n" + "\n".join(lines) + "\n}"


UNPACK = gl.constexpr((unpack_half(0), unpack_half(1)))


@gluon.jit
def _slab(words, exponents, PART: gl.constexpr, OPERAND: gl.constexpr):
    """Half a chunk's weights [64, 64]"""
    d = gl.bfloat16
    p0, p1, p2, p3 = gl.inline_asm_elementwise(
        UNPACK[PART], "=r,=r,=r,=r,r,r,r,r", [words, exponents], (d, d, d, d), is_pure=False, pack=2
    )
    w = side_by_side(side_by_side(p0, p1), side_by_side(p2, p3))
    return gl.convert_layout(w, OPERAND, assert_trivial=True)


@gluon.constexpr_function
def _rows_layout(groups):
    """How threads hold words of half of their rows [32 * groups, 16]"""
    warps = [[8, 0], [16, 0]] + ([[32, 0]] if groups == 2 else [])
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 8]], lanes, warps, [], [32 * groups, 16])


@gluon.jit
def _load(slots, slot, NUMBER: gl.constexpr, TOGETHER: gl.constexpr):
    """A chunk's words of 64 rows, and the exponents of each."""
    _x_slots, words_slots, exponents_slots, _full, _empty = slots
    OWN: gl.constexpr = 32 * TOGETHER
    ROWS: gl.constexpr = _rows_layout(TOGETHER)
    EXPONENTS: gl.constexpr = gl.SliceLayout(1, ROWS)
    LINES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2)
    all_words = words_slots._reinterpret(gl.int32, [words_slots.shape[0], words_slots.shape[1] * 8, 16], LINES)
    first = all_words.index(2 * slot).slice(OWN * NUMBER, OWN, 0).load(ROWS)
    second = all_words.index(2 * slot + 1).slice(OWN * NUMBER, OWN, 0).load(ROWS)
    first_bytes = exponents_slots.index(2 * slot).slice(OWN * NUMBER, OWN, 0).load(EXPONENTS)
    second_bytes = exponents_slots.index(2 * slot + 1).slice(OWN * NUMBER, OWN, 0).load(EXPONENTS)
    zeros = first ^ first
    exponents = _interleaved(first_bytes[:, None] + zeros, second_bytes[:, None] + zeros)
    return _interleaved(first, second), exponents


@gluon.jit
def _interleaved(first, second):
    """[rows, 16] twice -> [2 rows, 16]: eight rows of the first, eight of the second, and so on"""
    ROWS: gl.constexpr = first.shape[0]
    both = gl.join(first, second).reshape([ROWS // 8, 8, 16, 2]).permute((0, 3, 1, 2)).reshape([2 * ROWS, 16])
    return gl.convert_layout(both, words_layout(2 * ROWS, ROWS // 8, 16), assert_trivial=True)


@gluon.jit
def is_half(route_ptr, num_routes, tile, sizes: gl.constexpr):
    """Whether a tile has so few routes that it computes no more than half of itself."""
    return gl.load(route_ptr + tile * sizes[0] + sizes[0] // 2) >= num_routes if sizes[7] else tile < 0


@gluon.jit
def multiply(PIPELINE: gl.constexpr, NUMBER: gl.constexpr, slots, to, work, sizes: gl.constexpr):
    """64 rows of each tile: 32 of its first half, and the same of the second."""
    tile_expert_ptr, route_ptr, num_routes, num_tiles, columns, num_experts, expert_outputs, chunks = work
    BLOCK_M: gl.constexpr = sizes[0]
    if sizes[5]:
        gdc_wait()
    slot = 0
    phase = 0
    for number in range(
        PIPELINE * gl.num_programs(0) + gl.program_id(0), num_tiles * columns, sizes[6] * gl.num_programs(0)
    ):
        tile, column = find_tile(number, num_tiles, columns, sizes[2])
        expert = gl.load(tile_expert_ptr + tile)
        if (expert >= 0) & (expert < num_experts):
            place = (tile * BLOCK_M, expert.to(gl.int64) * expert_outputs, column)
            if sizes[7]:
                if is_half(route_ptr, num_routes, tile, sizes):
                    slot, phase = _compute(NUMBER, slots, slot, phase, chunks, to, place, BLOCK_M // 2, sizes)
                else:
                    slot, phase = _compute(NUMBER, slots, slot, phase, chunks, to, place, BLOCK_M, sizes)
            else:
                slot, phase = _compute(NUMBER, slots, slot, phase, chunks, to, place, BLOCK_M, sizes)


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    """-> the place of the next chunk, and the phase of its barriers"""
    slot += 1
    if slot == STAGES:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def _compute(NUMBER: gl.constexpr, slots, slot, phase, chunks, to, place, BLOCK_M: gl.constexpr, sizes: gl.constexpr):
    """A tile's sums -> where the first chunk of the next tile is."""
    x_slots, _words_slots, _exponents_slots, full, empty = slots
    STAGES: gl.constexpr = sizes[1]
    SLABS: gl.constexpr = 2 * (sizes[0] // BLOCK_M)  # of this size, in a place
    WARPS: gl.constexpr = 4 * sizes[8]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    X: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x_slabs = x_slots._reinterpret(gl.bfloat16, [SLABS * STAGES, BLOCK_M, 64], X)
    acc = gl.zeros([16 * WARPS, BLOCK_M], gl.float32, MMA)
    mbarrier.wait(full.index(slot), phase)
    words, exponents = _load(slots, slot, NUMBER, sizes[8])
    w = _slab(words, exponents, 0, OPERAND)
    for _ in range(chunks - 1):
        acc = warpgroup_mma(w, x_slabs.index(SLABS * slot).permute((1, 0)), acc, is_async=True)
        done = slot
        slot, phase = next_slot(slot, phase, STAGES)
        w = _slab(words, exponents, 1, OPERAND)
        mbarrier.wait(full.index(slot), phase)
        words, exponents = _load(slots, slot, NUMBER, sizes[8])
        acc = warpgroup_mma_wait(0, deps=[acc])
        acc = warpgroup_mma(w, x_slabs.index(SLABS * done + 1).permute((1, 0)), acc, is_async=True)
        w = _slab(words, exponents, 0, OPERAND)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(done))
    acc = warpgroup_mma(w, x_slabs.index(SLABS * slot).permute((1, 0)), acc, is_async=True)
    w = _slab(words, exponents, 1, OPERAND)
    acc = warpgroup_mma_wait(0, deps=[acc])
    acc = warpgroup_mma(w, x_slabs.index(SLABS * slot + 1).permute((1, 0)), acc)
    mbarrier.arrive(empty.index(slot))
    slot, phase = next_slot(slot, phase, STAGES)
    _finish(acc * SCALE, to, place, NUMBER, sizes)
    return slot, phase


@gluon.jit
def _finish(acc, to, place, NUMBER: gl.constexpr, sizes: gl.constexpr):
    """acc [rows of weights, routes]"""
    bias_ptr, expert_weight_ptr, out_ptr, route_ptr, num_routes, N = to
    slot, first_row, column = place
    BLOCK_M: gl.constexpr = acc.shape[1]
    ACTIVATION: gl.constexpr = sizes[3]
    GATED: gl.constexpr = ACTIVATION >= 0
    MMA: gl.constexpr = acc.type.layout
    WARPS: gl.constexpr = 4 * sizes[8]
    OWN: gl.constexpr = 8 * WARPS
    OUTPUTS: gl.constexpr = OWN if GATED else 2 * OWN
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [OUTPUTS // 8, 256 // OUTPUTS], [1, WARPS], [0, 1])
    base = column * (HALF if GATED else 2 * HALF) + NUMBER * OWN
    if bias_ptr is not None:
        places = gl.arange(0, 2 * OWN, gl.SliceLayout(1, MMA))
        output = base + places // 16 * 8 + places % 8
        if GATED:
            rows = gl.minimum(output, N - 1) + places // 8 % 2 * N
        else:
            rows = gl.minimum(output + places // 8 % 2 * HALF, N - 1)
        acc += gl.load(bias_ptr + first_row + rows)[:, None]
    numbers = gl.arange(0, OUTPUTS, gl.SliceLayout(1, LAYOUT))
    outputs = base + numbers // OWN * HALF + numbers % OWN
    slots = slot + gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT))
    routes = gl.load(route_ptr + slots)
    inside = (outputs < N)[:, None] & (routes < num_routes)[None, :]
    if GATED:
        gate, up = gl.split(acc.reshape([WARPS, 2, 8, BLOCK_M]).permute((0, 2, 3, 1)))
        values = activate_times(gate, up, ACTIVATION, sizes[4]).reshape([OUTPUTS, BLOCK_M])
        to_rows = slots.to(gl.int64)
    else:
        own = gl.load(route_ptr + slot + gl.arange(0, BLOCK_M, gl.SliceLayout(0, MMA)))
        acc *= gl.load(expert_weight_ptr + own, mask=own < num_routes, other=0.0)[None, :]
        values = acc.reshape([WARPS, 2, 8, BLOCK_M]).permute((1, 0, 2, 3)).reshape([OUTPUTS, BLOCK_M])
        to_rows = routes.to(gl.int64)
    offsets = to_rows[None, :] * N + outputs[:, None]
    gl.store(out_ptr + offsets, gl.convert_layout(values.to(out_ptr.dtype.element_ty), LAYOUT), mask=inside)
