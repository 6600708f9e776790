# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""y = x @ w.T for weights of 4 to 6 bits in groups and up to 16 rows of 16-bit activations, on tensor cores.

Written in Gluon, for lanes rather than tiles. A program has 16 outputs or more, and its warps take units of 256 inputs
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
from quire.ops.gpu.linear.few_fragments import UNIT, Fragments, x_fragments
from quire.ops.gpu.linear.few_unpack import SUMS, operands, plane_asm, two_bytes
from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.linear import PROGRAMS
from quire.ops.gpu.overlap import overlap_options


def few_kernel(
    x: Tensor, weight: GroupedWeight, bias: Tensor | None, config: FewConfig, overlap: bool = False
) -> Tensor:
    """x [M, K] bf16 -> [M, N]"""
    return few_of_fragments(x_fragments(x, weight.width, overlap), x, weight, bias, config, overlap)


def few_of_fragments(
    fragments: Fragments, x: Tensor, weight: GroupedWeight, bias: Tensor | None, config: FewConfig, overlap: bool
) -> Tensor:
    M, N, form, tokens = len(x), weight.num_outputs, few_format(weight), len(fragments.x)
    assert form is not None
    out = x.new_empty(M, N)
    tiles = triton.cdiv(N, 16 * config.tiles)
    grid = triton.cdiv(tiles, triton.cdiv(tiles, PROGRAMS * config.resident))
    joined, chained = form.group >= 32, form.group >= 64
    _few_kernel[(grid,)](
        fragments.x,
        fragments.sums,
        weight.words,
        weight.high if weight.high is None else weight.high.view(torch.int32),
        weight.scales.view(torch.int32),
        weight.super_scales,
        bias,
        out,
        M,
        N,
        weight.num_inputs // UNIT,
        KIND=form.kind,
        GROUP=form.group,
        SCALE_WORDS=form.words,
        HIGH=form.values.high_bits,
        POINTS=form.values.second == "points",
        LARGE=form.values.large,
        R=config.tiles,
        TOKENS=tokens,
        WARPS=config.warps,
        AHEAD=config.ahead,
        PLANES=tuple(plane_asm(plane, form.values, tokens, joined, False) for plane in range(8)),
        CHAINED=tuple(plane_asm(plane, form.values, tokens, joined, True) for plane in range(8)) if chained else (),
        OPERANDS=tuple(operands(form.values, tokens, joined, chain) for chain in (False, True)),
        TIMES=(two_bytes(1), two_bytes(-form.values.large)) if form.values.second == "offsets" else (),
        OVERLAP=overlap,
        num_warps=config.warps,
        **({"maxnreg": config.registers} if config.registers else {}),
        **overlap_options(overlap),
    )
    return out


# Pairs of words: lower halves, upper halves; of four bytes two pairs; -(128 + a zero point), twice in bf16
PAIRS = gl.constexpr(
    (
        "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;",
        "prmt.b32 $0, $2, 0, 0x4140; prmt.b32 $1, $2, 0, 0x4342;",
        "prmt.b32 $0, $1, 0xC3C3C3C3, 0x4242;",
    )
)
PLACE = gl.constexpr(tuple(f"prmt.b32 $0, $1, 0x4B000000, 0x744{index};" for index in range(4)))
OF_SUMS = gl.constexpr((SUMS, "=f,=f,=f,=f,r,r,r,r"))


@gluon.jit
def append(values, value):
    return values + (value,)  # noqa: RUF005 (Triton has no starred tuples)


@gluon.constexpr_function
def _words_a_row(kind, scale_words):
    return {"six": 4, "pairs": 6, "bytes": 5, "halves": scale_words}[kind]


@gluon.jit
def _load_run(ptr, places, layout: gl.constexpr, COUNT: gl.constexpr):
    """Of each lane the words COUNT * place .. COUNT * (place + 1): a tuple of [n]"""
    found = ()
    if COUNT == 8:
        found = _load_run(ptr, places * 2, layout, 4) + _load_run(ptr, places * 2 + 1, layout, 4)
    elif COUNT == 2 or COUNT == 4:
        WARPS: gl.constexpr = places.shape[0] // 32
        WIDE: gl.constexpr = gl.BlockedLayout([1, COUNT], [32, 1], [WARPS, 1], [1, 0])
        wide = gl.convert_layout(places, gl.SliceLayout(1, WIDE), assert_trivial=True)
        offsets = (wide * COUNT)[:, None] + gl.arange(0, COUNT, gl.SliceLayout(0, WIDE))[None, :]
        found = _parts(gl.load(ptr + offsets), layout)
    else:
        for number in gl.static_range(COUNT):
            found = append(found, gl.load(ptr + places * COUNT + number))
    return found


@gluon.jit
def _load_masked(ptr, places, present, layout: gl.constexpr, COUNT: gl.constexpr):
    """The same, of runs COUNT * places .., and zeros where none is present"""
    WARPS: gl.constexpr = places.shape[0] // 32
    WIDE: gl.constexpr = gl.BlockedLayout([1, COUNT], [32, 1], [WARPS, 1], [1, 0])
    wide = gl.convert_layout(places, gl.SliceLayout(1, WIDE), assert_trivial=True)
    here = gl.convert_layout(present, gl.SliceLayout(1, WIDE), assert_trivial=True)
    offsets = (wide * COUNT)[:, None] + gl.arange(0, COUNT, gl.SliceLayout(0, WIDE))[None, :]
    return _parts(gl.load(ptr + offsets, mask=here[:, None], other=0), layout)


@gluon.jit
def _parts(x, layout: gl.constexpr):
    """[n, 2] or [n, 4] -> two or four [n]"""
    if x.shape[1] == 2:
        found = gl.split(x)
    else:
        even, odd = gl.split(x.reshape([x.shape[0], 2, 2]))
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        found = (first, second, third, fourth)
    converted = ()
    for number in gl.static_range(len(found)):
        converted = append(converted, gl.convert_layout(found[number], layout, assert_trivial=True))
    return converted


@gluon.jit
def _stacked(values):
    """A tuple of 2, 4, 8 or 16 [n] -> [n, count]"""
    COUNT: gl.constexpr = len(values)
    if COUNT == 2:
        stacked = gl.join(values[0], values[1])
    else:
        stacked = gl.join(_stacked(values[: COUNT // 2]), _stacked(values[COUNT // 2 :]))
        stacked = stacked.permute((0, 2, 1)).reshape([values[0].shape[0], COUNT])
    return stacked


@gluon.jit
def _load_weights(
    words_ptr, high_ptr, scale_ptr, super_ptr, lane, warp, tile, step, N, units,
    KIND: gl.constexpr, SCALE_WORDS: gl.constexpr, HIGH: gl.constexpr, R: gl.constexpr, WARPS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """A warp's unit of a step: of each of a lane's 2 R outputs eight words, further bits, and scales. Past the last
    unit, or the last output, what is loaded is multiplied with zeros or never stored."""
    unit = gl.minimum(step * WARPS + warp, units - 1)
    words, high, numbers = (), (), ()
    for r in gl.static_range(2 * R):
        row = gl.minimum(tile * (16 * R) + r * 8 + lane // 4, N - 1)
        for half in gl.static_range(2):
            place = (row * units + unit) * 8 + half * 4 + lane % 4
            words = words + _load_run(words_ptr, place, layout, 4)
            if HIGH > 0:
                high = high + _load_run(high_ptr, place, layout, HIGH)
        if KIND == "bytes":
            for chunk in gl.static_range(2):
                numbers = numbers + _load_run(scale_ptr, (unit * 2 + chunk) * N + row, layout, SCALE_WORDS)
        else:
            numbers = numbers + _load_run(scale_ptr, unit * N + row, layout, SCALE_WORDS)
        if KIND == "pairs":
            numbers = append(numbers, gl.load(scale_ptr + (unit * N + row) * 4 + lane % 4))
        if KIND != "halves":
            numbers = append(numbers, gl.load(super_ptr + unit * N + row))
    return words, high, numbers


@gluon.jit
def _prefetch(words_ptr, lane, warp, tile, step, N, units, R: gl.constexpr, WARPS: gl.constexpr):
    unit = gl.minimum(step * WARPS + warp, units - 1)
    row = gl.minimum(tile * (16 * R) + lane % (16 * R), N - 1)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [words_ptr + (row * units + unit) * 32], gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _half_at(word, SHIFT: gl.constexpr):
    """An fp16 in an int32, as fp32"""
    return (word >> SHIFT).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def _asm(several: gl.constexpr, NUMBER: gl.constexpr, words, COUNT: gl.constexpr):
    """Integers of one or two results"""
    if COUNT == 1:
        found = gl.inline_asm_elementwise(
            several[NUMBER], "=r" + ",r" * len(words), list(words), gl.int32, is_pure=True, pack=1
        )
    else:
        found = gl.inline_asm_elementwise(
            several[NUMBER], "=&r,=r" + ",r" * len(words), list(words), (gl.int32, gl.int32), is_pure=True, pack=1
        )
    return found


@gluon.jit
def _dots(
    several: gl.constexpr,
    NUMBER: gl.constexpr,
    operands: gl.constexpr,
    CHAIN: gl.constexpr,
    values,
    COUNT: gl.constexpr,
):
    """Sums of four, eight or sixteen"""
    if COUNT == 4:
        found = gl.inline_asm_elementwise(
            several[NUMBER],
            operands[CHAIN],
            list(values),
            (gl.float32, gl.float32, gl.float32, gl.float32),
            is_pure=True,
            pack=1,
        )
    elif COUNT == 8:
        found = gl.inline_asm_elementwise(
            several[NUMBER],
            operands[CHAIN],
            list(values),
            (gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        found = gl.inline_asm_elementwise(
            several[NUMBER],
            operands[CHAIN],
            list(values),
            (
                gl.float32,
                gl.float32,
                gl.float32,
                gl.float32,
                gl.float32,
                gl.float32,
                gl.float32,
                gl.float32,
                gl.float32,
                gl.float32,
                gl.float32,
                gl.float32,
                gl.float32,
                gl.float32,
                gl.float32,
                gl.float32,
            ),
            is_pure=True,
            pack=1,
        )
    return found


@gluon.jit
def _pairs_of(words, high, HIGH: gl.constexpr, R: gl.constexpr):
    """For each of 2 R rows: the lower halves of words in four pairs, the upper halves, and further bits of the pairs"""
    pairs, further = (), ()
    for r in gl.static_range(2 * R):
        lower, higher = (), ()
        for two in gl.static_range(4):
            a, b = _asm(PAIRS, 0, (words[8 * r + 2 * two], words[8 * r + 2 * two + 1]), 2)
            lower, higher = append(lower, a), append(higher, b)
        pairs = pairs + lower + higher
    if HIGH == 2:
        further = high
    elif HIGH == 1:
        for number in gl.static_range(4 * R):
            a, b = _asm(PAIRS, 1, (high[number],), 2)
            further = append(append(further, a), b)
    return pairs, further


@gluon.jit
def _two_levels(own, selector, upper, KIND: gl.constexpr, PER_ROW: gl.constexpr, TIMES: gl.constexpr, R: gl.constexpr):
    """What the sums of groups are multiplied with: for each row -LARGE x the scales of a lane's two groups, and their
    offsets."""
    scales, offsets = (), ()
    for r in gl.static_range(2 * R):
        if KIND == "six":
            first, second, rest = own[PER_ROW * r], own[PER_ROW * r + 1], own[PER_ROW * r + 2]
            low, high = first & 0x3F3F3F3F, (rest & 0x0F0F0F0F) | ((first >> 2) & 0x30303030)
            low_offsets, high_offsets = second & 0x3F3F3F3F, ((rest >> 4) & 0x0F0F0F0F) | ((second >> 2) & 0x30303030)
            of_scales, of_offsets = gl.where(upper, high, low), gl.where(upper, high_offsets, low_offsets)
            scales = append(scales, _asm(TIMES, 1, (of_scales, selector), 1))
            offsets = append(offsets, _asm(TIMES, 0, (of_offsets, selector), 1))
        else:
            both = own[PER_ROW * r + 4]
            scales = append(scales, _asm(TIMES, 1, (both, selector * 0 + 0x4240), 1))
            offsets = append(offsets, _asm(TIMES, 0, (both, selector * 0 + 0x4341), 1))
    return scales, offsets


@gluon.jit
def _scale_words(own, KIND: gl.constexpr, PER_ROW: gl.constexpr, R: gl.constexpr):
    """Words from which `_scale` takes scales, PER_ROW a row."""
    found = own
    if KIND == "six":
        found = ()
        for r in gl.static_range(2 * R):
            first, rest = own[PER_ROW * r], own[PER_ROW * r + 2]
            low, high = first & 0x3F3F3F3F, (rest & 0x0F0F0F0F) | ((first >> 2) & 0x30303030)
            found = append(append(append(append(found, low), high), high), high)
    elif KIND == "bytes":
        found = ()
        for number in gl.static_range(2 * R * PER_ROW):
            found = append(found, own[number] if number % PER_ROW == 4 else own[number] ^ -0x7F7F7F80)
    return found


@gluon.jit
def _scale(words, ROW: gl.constexpr, PLANE: gl.constexpr, HALF: gl.constexpr, KIND: gl.constexpr,
           PER_ROW: gl.constexpr, GROUP: gl.constexpr, POINTS: gl.constexpr):  # fmt: skip
    """The scale of a plane (of half of it, where groups are so small), in fp32"""
    if KIND == "six":
        found = _asm(PLACE, PLANE % 4, (words[PER_ROW * ROW + PLANE // 4],), 1).to(gl.float32, bitcast=True) - 8388608.0
    elif KIND == "pairs":
        bits = _asm(PLACE, PLANE % 2 * 2, (words[PER_ROW * ROW + PLANE // 2],), 1)
        found = bits.to(gl.float32, bitcast=True) - 8388608.0
    elif KIND == "bytes":
        bits = _asm(PLACE, PLANE % 4, (words[PER_ROW * ROW + HALF * 2 + PLANE // 4],), 1)
        found = bits.to(gl.float32, bitcast=True) - 8388736.0
    elif POINTS:
        found = _half_at(words[PER_ROW * ROW + PLANE * 32 // GROUP], 0)
    else:
        found = _half_at(words[PER_ROW * ROW + PLANE * 32 // GROUP // 2], PLANE * 32 // GROUP % 2 * 16)
    return found


@gluon.jit(do_not_specialize=["M", "units"])
def _few_kernel(
    x_ptr,
    sums_ptr,
    words_ptr,
    high_ptr,
    scale_ptr,
    super_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    units,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    SCALE_WORDS: gl.constexpr,
    HIGH: gl.constexpr,
    POINTS: gl.constexpr,
    LARGE: gl.constexpr,
    R: gl.constexpr,
    TOKENS: gl.constexpr,
    WARPS: gl.constexpr,
    AHEAD: gl.constexpr,
    PLANES: gl.constexpr,
    CHAINED: gl.constexpr,
    OPERANDS: gl.constexpr,
    TIMES: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    THREADS: gl.constexpr = 32 * WARPS
    T: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    KINDS: gl.constexpr = 4 * TOKENS * R  # sums of a lane
    HALVES: gl.constexpr = 2 if GROUP == 16 else 1
    CHAIN: gl.constexpr = max(GROUP // 32, 1)
    PER_ROW: gl.constexpr = _words_a_row(KIND, SCALE_WORDS)
    thread = gl.arange(0, THREADS, T)
    warp, lane = thread // 32, thread % 32
    upper = lane % 4 >= 2
    selector = gl.where(lane % 2 == 0, 0x4140, 0x4342)
    programs, tiles, steps = gl.num_programs(0), gl.cdiv(N, 16 * R), gl.cdiv(units, WARPS)
    begin = gl.program_id(0)
    words, high, numbers = _load_weights(
        words_ptr, high_ptr, scale_ptr, super_ptr, lane, warp, begin, 0, N, units, KIND, SCALE_WORDS, HIGH, R, WARPS, T
    )
    far_tile, far_step = begin, 0
    for _ in gl.static_range(AHEAD):
        last = far_step + 1 == steps
        far_tile, far_step = gl.where(last, far_tile + programs, far_tile), gl.where(last, 0, far_step + 1)
        _prefetch(words_ptr, lane, warp, far_tile, far_step, N, units, R, WARPS)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()  # weights are loaded before, activations after
    parts = gl.allocate_shared_memory(gl.float32, [THREADS, KINDS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    by_warp = parts._reinterpret(gl.float32, [WARPS, 32 * KINDS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    SUM: gl.constexpr = gl.BlockedLayout([WARPS, 1], [1, 32], [1, WARPS], [1, 0])
    column = gl.arange(0, 32 * KINDS, gl.SliceLayout(0, SUM))
    kind, sum_lane = column % KINDS, column // KINDS
    own_output = kind // 4 % R * 16 + kind % 4 // 2 * 8 + sum_lane // 4
    own_token = kind // (4 * R) * 8 + sum_lane % 4 * 2 + kind % 2

    for tile in range(begin, tiles, programs):
        acc = ()
        for _ in gl.static_range(KINDS):
            acc = append(acc, gl.zeros([THREADS], gl.float32, T))
        for step in range(steps):
            unit = step * WARPS + warp
            present = unit < units
            pairs, further = _pairs_of(words, high, HIGH, R)
            own = numbers
            last = step + 1 == steps
            next_tile, next_step = gl.where(last, tile + programs, tile), gl.where(last, 0, step + 1)
            words, high, numbers = _load_weights(
                words_ptr, high_ptr, scale_ptr, super_ptr, lane, warp, next_tile, next_step, N, units,
                KIND, SCALE_WORDS, HIGH, R, WARPS, T,
            )  # fmt: skip
            if AHEAD > 0:
                last = far_step + 1 == steps
                far_tile, far_step = gl.where(last, far_tile + programs, far_tile), gl.where(last, 0, far_step + 1)
                _prefetch(words_ptr, lane, warp, far_tile, far_step, N, units, R, WARPS)
            scale_words = _scale_words(own, KIND, PER_ROW, R)
            sums, below = acc, ()
            if KIND == "six" or KIND == "pairs":
                scales, offsets = _two_levels(own, selector, upper, KIND, PER_ROW, TIMES, R)
                sums = ()
                for nt in gl.static_range(TOKENS):
                    here = present & (nt * 8 + lane // 4 < M)
                    main, rest = _load_masked(sums_ptr, (nt * units + unit) * 32 + lane, here, T, 2)
                    for r in gl.static_range(R):
                        sums = sums + _dots(OF_SUMS, 0, OF_SUMS, 1, (scales[2 * r], scales[2 * r + 1], main, rest), 4)
                        below = below + _dots(
                            OF_SUMS, 0, OF_SUMS, 1, (offsets[2 * r], offsets[2 * r + 1], main, rest), 4
                        )
            elif KIND == "bytes":
                sums = ()
                for _ in gl.static_range(KINDS):
                    sums = append(sums, gl.zeros([THREADS], gl.float32, T))
            dots = ()
            for plane in gl.static_range(8):
                x = ()
                for nt in gl.static_range(TOKENS):
                    here = present & (nt * 8 + lane // 4 < M)
                    x = x + _load_masked(x_ptr, ((nt * units + unit) * 8 + plane) * 32 + lane, here, T, 4)
                new_dots = ()
                for r in gl.static_range(R):
                    args = ()
                    for half in gl.static_range(2):
                        for number in gl.static_range(4):
                            args = append(args, pairs[16 * r + 8 * half + plane // 4 * 4 + number])
                    if HIGH > 0:
                        for number in gl.static_range(8):
                            args = append(args, further[8 * r + number])
                    if POINTS:
                        for half in gl.static_range(2):
                            word = own[PER_ROW * (2 * r + half) + plane // CHAIN]
                            args = append(args, _asm(PAIRS, 2, (word,), 1))
                    args = args + x
                    if plane % CHAIN == 0:
                        new_dots = new_dots + _dots(PLANES, plane, OPERANDS, 0, args, 4 * TOKENS * HALVES)
                    else:
                        for number in gl.static_range(4 * TOKENS):
                            args = append(args, dots[4 * TOKENS * r + number])
                        new_dots = new_dots + _dots(CHAINED, plane, OPERANDS, 1, args, 4 * TOKENS)
                dots = new_dots
                if plane % CHAIN == CHAIN - 1:
                    for half in gl.static_range(HALVES):
                        row_scales = ()
                        for r in gl.static_range(2 * R):
                            row_scales = append(
                                row_scales, _scale(scale_words, r, plane, half, KIND, PER_ROW, GROUP, POINTS)
                            )
                        new_sums = ()
                        for nt in gl.static_range(TOKENS):
                            for r in gl.static_range(R):
                                for c in gl.static_range(4):
                                    dot = dots[4 * TOKENS * HALVES * r + 4 * TOKENS * half + 4 * nt + c]
                                    before = sums[(nt * R + r) * 4 + c]
                                    new_sums = append(new_sums, before + dot * row_scales[2 * r + c // 2])
                        sums = new_sums
            if KIND == "halves":
                acc = sums
            else:
                new_acc = ()
                for nt in gl.static_range(TOKENS):
                    for r in gl.static_range(R):
                        for c in gl.static_range(4):
                            above = own[PER_ROW * (2 * r + c // 2) + PER_ROW - 1]
                            total = sums[(nt * R + r) * 4 + c]
                            if KIND == "bytes":
                                more = total * above
                            else:
                                more = total * _half_at(above, 0)
                                more -= below[(nt * R + r) * 4 + c] * _half_at(above, 16)
                            new_acc = append(new_acc, acc[(nt * R + r) * 4 + c] + more)
                acc = new_acc
        parts.store(_stacked(acc))
        total = gl.sum(by_warp.load(SUM), axis=0)
        output = tile * (16 * R) + own_output
        if bias_ptr is not None:
            total += gl.load(bias_ptr + output, mask=output < N, other=0.0).to(gl.float32)
        inside = (output < N) & (own_token < M)
        gl.store(out_ptr + own_token * N + output, total.to(out_ptr.dtype.element_ty), mask=inside)
