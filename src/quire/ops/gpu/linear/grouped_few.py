# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""y = x @ w.T for weights of 4 to 6 bits in groups and up to 16 rows of 16-bit activations, on tensor cores.

Written in Gluon, for lanes rather than tiles. A program has tiles of 16 outputs, and its warps take units of 256 inputs
in turn; their sums are added up in shared memory. A lane loads words of two outputs at a time, unpacks them into the
registers that tensor cores read, and multiplies sums of groups with scales: weights are not rounded. While it does so,
the next words are in flight, those of the program's next outputs too."""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.gpu.linear.few_config import FewConfig, few_format
from quire.ops.gpu.linear.few_fragments import UNIT
from quire.ops.gpu.linear.few_lanes import (
    append,
    load_present,
    load_run,
    of_plane_sums,
    pairs_of,
    scale_of,
    scale_pairs,
    stacked,
    sums_of,
    with_super_scale,
    words_of,
)
from quire.ops.gpu.linear.few_unpack import PAIRS, SUMS, operands, plane_asm
from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.linear import PROGRAMS
from quire.ops.gpu.linear.quantize_rows import QuantizedRows
from quire.ops.gpu.overlap import overlap_options


def few_kernel(
    x: QuantizedRows,
    weight: GroupedWeight,
    bias: Tensor | None,
    config: FewConfig,
    dtype: torch.dtype = torch.bfloat16,
    overlap: bool = False,
) -> Tensor:
    """x [M, K] in fp16, in groups of the weight's width -> [M, N]"""
    M, N, form, tokens = len(x.q), weight.num_outputs, few_format(weight), len(x.scales)
    assert form is not None and x.q.dtype == torch.float16 and x.q.shape[1] == weight.num_inputs
    out = torch.empty(M, N, dtype=dtype, device=x.q.device)
    units, tiles = weight.num_inputs // UNIT * (weight.bits // 4), triton.cdiv(N, 16)
    grid = triton.cdiv(tiles, triton.cdiv(tiles, PROGRAMS * config.resident))
    planes, joined, chained = range(32 // weight.bits), form.group >= 32, form.group >= 64
    _few_kernel[(grid,)](
        x.q.view(torch.int32),
        x.scales.view(torch.int32),
        x.scales,
        weight.words,
        weight.high if weight.high is None else weight.high.view(torch.int32),
        weight.scales if form.kind == "floats" else weight.scales.view(torch.int32),
        weight.super_scales,
        bias,
        out,
        M,
        N,
        units,
        BITS=weight.bits,
        KIND=form.kind,
        GROUP=form.group,
        SCALE_WORDS=form.words,
        HIGH=form.values.high_bits,
        POINTS=form.values.second == "points",
        TOKENS=tokens,
        WARPS=config.warps,
        PLANES=tuple(plane_asm(plane, form.values, tokens, joined, False) for plane in planes),
        CHAINED=tuple(plane_asm(plane, form.values, tokens, joined, True) for plane in planes) if chained else (),
        OPERANDS=tuple(operands(form.values, tokens, joined, chain) for chain in (False, True)),
        BATCH=config.batch,
        EVEN=N % 16 == 0,
        WHOLE=units % config.warps == 0,
        OVERLAP=overlap,
        num_warps=config.warps,
        **({"maxnreg": config.registers} if config.registers else {}),
        **overlap_options(overlap),
    )
    return out


OF_SUMS = gl.constexpr((SUMS, "=f,=f,=f,=f,r,r,r,r"))
LESS = gl.constexpr(PAIRS)


@gluon.constexpr_function
def _words_a_row(kind, scale_words):
    """Of scales, with super-scales, that a lane loads."""
    return {"six": 4, "pairs": 6, "bytes": 5, "halves": scale_words, "floats": scale_words}[kind]


@gluon.constexpr_function
def _rows(number, even):
    """That a lane's second output lies behind its first one, where that is never past the last"""
    return 8 * number if even else 0


@gluon.jit
def _load_weights(
    words_ptr, high_ptr, scale_ptr, super_ptr, lane, warp, tile, step, N, units,
    KIND: gl.constexpr, SCALE_WORDS: gl.constexpr, HIGH: gl.constexpr, WARPS: gl.constexpr,
    EVEN: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """A warp's unit of a step: of each of a lane's two outputs eight words, further bits, and scales. What is past the
    last unit, tile or output is multiplied with zeros or never stored."""
    first = gl.minimum(tile, gl.cdiv(N, 16) - 1) * 16
    # What is the same for all lanes is added last.
    own_unit = warp if WHOLE else gl.minimum(step * WARPS + warp, units - 1)
    all_units = step * WARPS if WHOLE else 0
    words, high, numbers = (), (), ()
    for number in gl.static_range(2):
        row = lane // 4 + number * 8
        if EVEN:
            place = row * units + own_unit + (first * units + all_units)
            scale_place = own_unit * N + lane // 4 + (all_units * N + first)
            chunk_place = own_unit * (2 * N) + lane // 4 + (all_units * (2 * N) + first)
            group_place = own_unit * (SCALE_WORDS * N) + lane // 4 + (all_units * (SCALE_WORDS * N) + first)
        else:
            row = gl.minimum(first + row, N - 1)
            place = row * units + own_unit + all_units
            scale_place = (own_unit + all_units) * N + row
            chunk_place = (own_unit + all_units) * (2 * N) + row
            group_place = (own_unit + all_units) * (SCALE_WORDS * N) + row
        for half in gl.static_range(2):
            words = words + load_run(words_ptr, place * 8 + lane % 4, 4, 16 * half)
            if HIGH > 0:
                high = high + load_run(high_ptr, place * 8 + lane % 4, HIGH, 4 * HIGH * half)
        if KIND == "bytes":
            numbers = numbers + load_run(scale_ptr, chunk_place, SCALE_WORDS, SCALE_WORDS * _rows(number, EVEN))
            numbers = numbers + load_run(scale_ptr, chunk_place + N, SCALE_WORDS, SCALE_WORDS * _rows(number, EVEN))
        elif KIND == "floats":
            for group in gl.static_range(SCALE_WORDS):
                numbers = append(numbers, gl.load(scale_ptr + (group_place + group * N) + _rows(number, EVEN)))
        else:
            numbers = numbers + load_run(scale_ptr, scale_place, SCALE_WORDS, SCALE_WORDS * _rows(number, EVEN))
        if KIND == "pairs":
            numbers = numbers + load_run(scale_ptr, scale_place * 4 + lane % 4, 1, 4 * _rows(number, EVEN))
        if KIND != "halves" and KIND != "floats":
            numbers = numbers + load_run(super_ptr, scale_place, 1, _rows(number, EVEN))
    return words, high, numbers


@gluon.jit(do_not_specialize=["M", "units"])
def _few_kernel(
    x_ptr,
    sums_ptr,
    x_scale_ptr,
    words_ptr,
    high_ptr,
    scale_ptr,
    super_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    units,
    BITS: gl.constexpr,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    SCALE_WORDS: gl.constexpr,
    HIGH: gl.constexpr,
    POINTS: gl.constexpr,
    TOKENS: gl.constexpr,
    WARPS: gl.constexpr,
    PLANES: gl.constexpr,
    CHAINED: gl.constexpr,
    OPERANDS: gl.constexpr,
    BATCH: gl.constexpr,
    EVEN: gl.constexpr,
    WHOLE: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    THREADS: gl.constexpr = 32 * WARPS
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    KINDS: gl.constexpr = 4 * TOKENS  # sums of a lane: two outputs of two tokens, for every eight tokens
    HALVES: gl.constexpr = 2 if GROUP == 16 else 1
    CHAIN: gl.constexpr = max(GROUP // 32, 1)
    PLANE_COUNT: gl.constexpr = 32 // BITS
    PER_SCALE: gl.constexpr = BITS // 4  # units of 128 inputs, of which two share a scale of x
    PER_ROW: gl.constexpr = _words_a_row(KIND, SCALE_WORDS)
    thread = gl.arange(0, THREADS, LANES)
    warp, lane = thread // 32, thread % 32
    programs, tiles, steps = gl.num_programs(0), gl.cdiv(N, 16), gl.cdiv(units, WARPS)
    begin = gl.program_id(0)
    words, high, numbers = _load_weights(
        words_ptr, high_ptr, scale_ptr, super_ptr, lane, warp, begin, 0, N, units,
        KIND, SCALE_WORDS, HIGH, WARPS, EVEN, WHOLE,
    )  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()  # weights are loaded before, activations after
    parts = gl.allocate_shared_memory(gl.float32, [BATCH, THREADS, KINDS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    by_warp = parts._reinterpret(gl.float32, [BATCH, WARPS, 32 * KINDS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    SUM: gl.constexpr = gl.BlockedLayout([WARPS, 1], [1, 32], [1, WARPS], [1, 0])
    column = gl.arange(0, 32 * KINDS, gl.SliceLayout(0, SUM))
    own_output = column % 4 // 2 * 8 + column // KINDS // 4
    own_token = column % KINDS // 4 * 8 + column // KINDS % 4 * 2 + column % 2

    slot = 0
    for tile in range(begin, tiles, programs):
        acc = ()
        for _ in gl.static_range(KINDS):
            acc = append(acc, gl.zeros([THREADS], gl.float32, LANES))
        for step in range(steps):
            unit = step * WARPS + warp
            present = (lane >= 0) if WHOLE else unit < units
            pairs, further = pairs_of(words, high, BITS, HIGH)
            own = numbers
            last = step + 1 == steps
            next_tile, next_step = gl.where(last, tile + programs, tile), gl.where(last, 0, step + 1)
            words, high, numbers = _load_weights(
                words_ptr, high_ptr, scale_ptr, super_ptr, lane, warp, next_tile, next_step, N, units,
                KIND, SCALE_WORDS, HIGH, WARPS, EVEN, WHOLE,
            )  # fmt: skip
            scales_from = scale_pairs(own, lane, KIND, PER_ROW)
            sums, below = (), ()
            if KIND == "six" or KIND == "pairs":
                of_scales, of_offsets = of_plane_sums(own, lane, KIND, PER_ROW)
                for nt in gl.static_range(TOKENS):
                    here = present & (nt * 8 + lane // 4 < M)
                    main, rest = load_present(sums_ptr, (nt * units + unit) * 36 + lane, here, WHOLE, 2)
                    sums = sums + sums_of(OF_SUMS, 0, OF_SUMS, 1, (of_scales[0], of_scales[1], main, rest), 4)
                    below = below + sums_of(OF_SUMS, 0, OF_SUMS, 1, (of_offsets[0], of_offsets[1], main, rest), 4)
            else:
                for _ in gl.static_range(KINDS):
                    sums = append(sums, gl.zeros([THREADS], gl.float32, LANES))
            dots = ()
            for plane in gl.static_range(PLANE_COUNT):
                args = ()
                for row in gl.static_range(2):
                    for number in gl.static_range(BITS):
                        args = append(args, pairs[8 * row + (plane // 4 * 4 if BITS == 4 else 0) + number])
                args = args + further
                if POINTS:
                    for row in gl.static_range(2):
                        less = words_of(LESS, 2, (own[PER_ROW * row + plane // CHAIN],), 2)
                        args = append(args, less[plane % 2])
                for nt in gl.static_range(TOKENS):
                    here = present & (nt * 8 + lane // 4 < M)
                    args = args + load_present(
                        x_ptr, (nt * units + unit) * (PLANE_COUNT * 32) + lane, here, WHOLE, 4, plane * 128
                    )
                if plane % CHAIN == 0:
                    dots = sums_of(PLANES, plane, OPERANDS, 0, args, KINDS * HALVES)
                else:
                    dots = sums_of(CHAINED, plane, OPERANDS, 1, args + dots, KINDS)
                if plane % CHAIN == CHAIN - 1:
                    for half in gl.static_range(HALVES):
                        scales = (
                            scale_of(scales_from, 0, plane, half, KIND, PER_ROW, GROUP, POINTS),
                            scale_of(scales_from, 1, plane, half, KIND, PER_ROW, GROUP, POINTS),
                        )
                        more = ()
                        for number in gl.static_range(KINDS):
                            more = append(more, sums[number] + dots[KINDS * half + number] * scales[number % 4 // 2])
                        sums = more
            new_acc = ()
            for nt in gl.static_range(TOKENS):
                x_scales = load_present(
                    x_scale_ptr, (nt * units + unit) // PER_SCALE * 36 + 32 + lane % 4, present, WHOLE, 2
                )
                for c in gl.static_range(4):
                    above = own[PER_ROW * (c // 2) + PER_ROW - 1]
                    more = with_super_scale(sums, below, 4 * nt + c, above, KIND)
                    new_acc = append(new_acc, acc[4 * nt + c] + more * x_scales[c % 2])
            acc = new_acc
        parts.index(slot).store(stacked(acc))
        if (slot == BATCH - 1) | (tile + programs >= tiles):
            for number in range(slot + 1):
                total = gl.sum(by_warp.index(number).load(SUM), axis=0)
                output = (tile - (slot - number) * programs) * 16 + own_output
                if bias_ptr is not None:
                    total += gl.load(bias_ptr + output, mask=output < N, other=0.0).to(gl.float32)
                inside = (output < N) & (own_token < M)
                gl.store(out_ptr + own_token * N + output, total.to(out_ptr.dtype.element_ty), mask=inside)
            slot = 0
        else:
            slot += 1
