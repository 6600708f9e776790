# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Experts quantized in groups for few tokens: tiles of 8 or 16 routes, and weights that go from memory straight into
the registers in which tensor cores read them.

What bounds it is the memory, so each warp streams rows of its own and waits for no other: it has the words of `depth`
chunks in flight, and unpacks them where they are multiplied. Only activations are in shared memory, all inputs of a
program at once. A warp multiplies 16 gate and 16 up rows, or 32 down rows, with the same activations. Sums of offsets
times activations come from the tensor cores, too: rows of ones."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.gpu.activation import activate_times
from quire.ops.gpu.linear.wide_planes import halves_of
from quire.ops.gpu.linear.wide_scales import append
from quire.ops.gpu.moe.few_unpack import (
    all_planes,
    load_chunk,
    number_of,
    plane_of,
    pointers_of,
    signed_bytes,
    six_bits,
    super_scales,
    words_layout,
)


@gluon.jit
def _of_rows(scale, MMA: gl.constexpr):
    return gl.convert_layout(scale, gl.SliceLayout(2, MMA), assert_trivial=True)[:, :, None]


@gluon.jit
def _add_chunk(
    acc,
    up_acc,
    loaded,
    up_loaded,
    x_chunk,
    MMA: gl.constexpr,
    BITS: gl.constexpr,
    WIDTH: gl.constexpr,
    GROUP: gl.constexpr,
    KIND: gl.constexpr,
    SECOND: gl.constexpr,
    CODEBOOK: gl.constexpr,
    HIGH: gl.constexpr,
    UNPACK: gl.constexpr,
):
    """Both sums, [parts, rows, columns], and a chunk of weights times x_chunk [parts, columns, inputs]."""
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    PLANES: gl.constexpr = 32 // BITS
    if KIND == "exponents":
        planes, up_planes = all_planes(loaded, KIND, UNPACK), all_planes(up_loaded, KIND, UNPACK)
        for plane in gl.static_range(PLANES):
            x = x_chunk.slice(plane * WIDTH, WIDTH, 2).permute((0, 2, 1)).load(B)
            acc = mma_v2(gl.convert_layout(planes[plane], A, assert_trivial=True), x, acc)
            up_acc = mma_v2(gl.convert_layout(up_planes[plane], A, assert_trivial=True), x, up_acc)
    else:
        GROUPS: gl.constexpr = max(PLANES * WIDTH // GROUP, 1)
        if CODEBOOK != "":
            planes, up_planes = all_planes(loaded, KIND, UNPACK), all_planes(up_loaded, KIND, UNPACK)
        else:
            planes, up_planes = halves_of(loaded[0]), halves_of(up_loaded[0])
        numbers, up_numbers = loaded[2], up_loaded[2]
        if KIND == "six":
            numbers, up_numbers = six_bits(numbers), six_bits(up_numbers)
        elif KIND == "bytes":
            numbers, up_numbers = signed_bytes(numbers), signed_bytes(up_numbers)
        SUPER: gl.constexpr = KIND == "six" or KIND == "bytes"
        if SUPER:  # what is multiplied with super-scales at the end
            whole_acc, whole_up_acc, none = acc, up_acc, gl.zeros_like(acc)
            acc, up_acc, below, up_below = none, none, none, none
        EACH: gl.constexpr = PLANES // GROUPS
        for group in gl.static_range(GROUPS):
            part, up_part, x_sum = gl.zeros_like(acc), gl.zeros_like(acc), gl.zeros_like(acc)
            for number in gl.static_range(EACH):
                x = x_chunk.slice((group * EACH + number) * WIDTH, WIDTH, 2).permute((0, 2, 1)).load(B)
                if CODEBOOK != "":
                    w, up_w = planes[group * EACH + number], up_planes[group * EACH + number]
                else:
                    w = plane_of(planes, loaded, group * EACH + number, SECOND, HIGH, EACH, BITS, UNPACK)
                    up_w = plane_of(up_planes, up_loaded, group * EACH + number, SECOND, HIGH, EACH, BITS, UNPACK)
                part = mma_v2(gl.convert_layout(w, A, assert_trivial=True), x, part)
                up_part = mma_v2(gl.convert_layout(up_w, A, assert_trivial=True), x, up_part)
                if SECOND == "offsets":
                    x_sum = mma_v2(gl.full([acc.shape[0], acc.shape[1], WIDTH], 1.0, gl.bfloat16, A), x, x_sum)
            acc += part * _of_rows(number_of(numbers, KIND, SECOND, group, 0), MMA)
            up_acc += up_part * _of_rows(number_of(up_numbers, KIND, SECOND, group, 0), MMA)
            if SECOND == "offsets":
                offsets = x_sum * _of_rows(number_of(numbers, KIND, SECOND, group, 1), MMA)
                up_offsets = x_sum * _of_rows(number_of(up_numbers, KIND, SECOND, group, 1), MMA)
                if SUPER:
                    below += offsets
                    up_below += up_offsets
                else:
                    acc += offsets
                    up_acc += up_offsets
        if SUPER:
            of_scales, of_offsets = super_scales(numbers, SECOND)
            up_of_scales, up_of_offsets = super_scales(up_numbers, SECOND)
            acc = whole_acc + acc * _of_rows(of_scales, MMA)
            up_acc = whole_up_acc + up_acc * _of_rows(up_of_scales, MMA)
            if SECOND == "offsets":
                acc += below * _of_rows(of_offsets, MMA)
                up_acc += up_below * _of_rows(up_of_offsets, MMA)
    return acc, up_acc


@gluon.jit(do_not_specialize=["num_routes"])
def few_kernel(
    x_ptr,
    words_ptr,
    high_ptr,
    scales_ptr,
    offsets_ptr,
    super_ptr,
    bias_ptr,
    expert_weight_ptr,
    out_ptr,
    route_ptr,
    tile_expert_ptr,
    num_routes,
    num_experts,
    N,
    K,
    chunks,
    x_stride,
    routes_a_row,
    all_outputs,
    ACTIVATION: gl.constexpr,
    LIMIT: gl.constexpr,
    SPLITS: gl.constexpr,
    SHARE: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    ONCE: gl.constexpr,
    PARTS: gl.constexpr,
    WARPS: gl.constexpr,
    IDS_ARE_KNOWN: gl.constexpr,
    OVERLAP: gl.constexpr,
    BITS: gl.constexpr,
    WIDTH: gl.constexpr,
    GROUP: gl.constexpr,
    KIND: gl.constexpr,
    SECOND: gl.constexpr,
    CODEBOOK: gl.constexpr,
    HIGH: gl.constexpr,
    UNPACK: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [PARTS, WARPS, 1], [1, 16, 8])
    WORDS: gl.constexpr = words_layout(PARTS, WARPS, WIDTH)
    ROWS: gl.constexpr = gl.SliceLayout(2, WORDS)
    CHUNK: gl.constexpr = 32 // BITS * WIDTH
    BLOCK_N: gl.constexpr = 16 * WARPS
    GATED: gl.constexpr = ACTIVATION >= 0
    tile = gl.program_id(1)
    if OVERLAP and not IDS_ARE_KNOWN:
        gdc_wait()
        gdc_launch_dependents()  # the next kernel reads routes and experts before it waits
    expert = gl.load(tile_expert_ptr + tile, cache_modifier=".cg")
    if (expert >= 0) & (expert < num_experts):
        expert_rows = expert.to(gl.int64) * (2 * N if GATED else N)
        first = gl.program_id(0) * (BLOCK_N if GATED else 2 * BLOCK_N)
        outputs = (first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, ROWS)))[None, :]
        columns = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(0, WORDS)))
        rows = gl.minimum(outputs, N - 1)
        up_rows = rows + N if GATED else gl.minimum(outputs + BLOCK_N, N - 1)
        part = (gl.program_id(2) * PARTS + gl.arange(0, PARTS, gl.SliceLayout(1, ROWS)))[:, None]
        begin = gl.minimum(part * SHARE, chunks - SHARE)
        pointers = pointers_of(words_ptr, high_ptr, scales_ptr, offsets_ptr, super_ptr, expert_rows, rows, columns,
                               begin, chunks, all_outputs, KIND, SECOND, HIGH, GROUP, CHUNK, WIDTH,
                               CODEBOOK)  # fmt: skip
        up_pointers = pointers_of(words_ptr, high_ptr, scales_ptr, offsets_ptr, super_ptr, expert_rows, up_rows,
                                  columns, begin, chunks, all_outputs, KIND, SECOND, HIGH, GROUP, CHUNK, WIDTH,
                                  CODEBOOK)  # fmt: skip
        loaded, up_loaded = (), ()
        zero = gl.program_id(2) * 0
        for d in gl.static_range(DEPTH):
            loaded = append(loaded, load_chunk(
                pointers, begin, zero + d, all_outputs, KIND, SECOND, HIGH, GROUP, CHUNK, WIDTH,
                CODEBOOK,
            ))  # fmt: skip
            up_loaded = append(up_loaded, load_chunk(
                up_pointers, begin, zero + d, all_outputs, KIND, SECOND, HIGH, GROUP, CHUNK, WIDTH,
                CODEBOOK,
            ))  # fmt: skip
        if OVERLAP and IDS_ARE_KNOWN:
            gdc_wait()
            gdc_launch_dependents()

        # Activations of two rounds, of DEPTH chunks each: those of the next one come while one is multiplied.
        SLOTS: gl.constexpr = DEPTH if ONCE else 2 * DEPTH
        SHARED: gl.constexpr = gl.SwizzledSharedLayout(16, 1, min(CHUNK // 16, 8), [2, 1, 0])
        x_slots = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, PARTS, COLUMNS, CHUNK], SHARED)
        x = _x_of(x_ptr, route_ptr, tile, num_routes, routes_a_row, x_stride, chunks, SHARE, COLUMNS, CHUNK, PARTS,
                  PARTS * WARPS)  # fmt: skip
        for d in gl.static_range(DEPTH):
            _copy_x(x_slots.index(d), x, zero + d, K, SHARE)
        acc = gl.zeros([PARTS, BLOCK_N, COLUMNS], gl.float32, MMA)
        up_acc = gl.zeros([PARTS, BLOCK_N, COLUMNS], gl.float32, MMA)
        half = zero
        for outer in range(0, SHARE, DEPTH):
            async_copy.wait_group(0)
            gl.thread_barrier()  # all warps have this round, and are done with the one before
            if not ONCE:
                for d in gl.static_range(DEPTH):
                    _copy_x(x_slots.index(DEPTH - half + d), x, outer + DEPTH + d, K, SHARE)
            coming, up_coming = (), ()
            for d in gl.static_range(DEPTH):
                if outer + d < SHARE:
                    acc, up_acc = _add_chunk(
                        acc, up_acc, loaded[d], up_loaded[d], x_slots.index(half + d), MMA,
                        BITS, WIDTH, GROUP, KIND, SECOND, CODEBOOK, HIGH, UNPACK,
                    )  # fmt: skip
                if not ONCE:
                    ahead = gl.minimum(outer + d + DEPTH, SHARE - 1)
                    coming = append(coming, load_chunk(
                        pointers, begin, ahead, all_outputs, KIND, SECOND, HIGH, GROUP, CHUNK, WIDTH,
                        CODEBOOK,
                    ))  # fmt: skip
                    up_coming = append(up_coming, load_chunk(
                        up_pointers, begin, ahead, all_outputs, KIND, SECOND, HIGH, GROUP, CHUNK, WIDTH,
                        CODEBOOK,
                    ))  # fmt: skip
            if not ONCE:
                loaded, up_loaded = coming, up_coming
                half = DEPTH - half

        if KIND == "exponents":
            acc *= 18446744073709551616.0  # 2**64
            up_acc *= 18446744073709551616.0
        _store(
            gl.sum(acc, axis=0), gl.sum(up_acc, axis=0), bias_ptr, expert_weight_ptr, out_ptr, route_ptr, tile,
            num_routes, expert_rows, first, N, ACTIVATION, LIMIT, BLOCK_N, COLUMNS, gl.SliceLayout(0, MMA),
        )  # fmt: skip
    elif OVERLAP and IDS_ARE_KNOWN:
        gdc_wait()
        gdc_launch_dependents()


@gluon.jit
def _x_of(
    x_ptr,
    route_ptr,
    tile,
    num_routes,
    routes_a_row,
    x_stride,
    chunks,
    SHARE: gl.constexpr,
    COLUMNS: gl.constexpr,
    CHUNK: gl.constexpr,
    PARTS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Where each part's first chunk of the tile's rows lies, [parts, columns, inputs]; which inputs these are, and how
    many of a part's chunks belong to the part before, for [parts, 1, 1]; which rows there are."""
    ACROSS: gl.constexpr = min(CHUNK // 8, 32)
    ROWS: gl.constexpr = 32 // ACROSS
    OF_WARPS: gl.constexpr = min(PARTS, WARPS)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, ROWS, ACROSS], [OF_WARPS, WARPS // OF_WARPS, 1], [2, 1, 0])
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :]
    if route_ptr is None:
        routes = gl.where(column == 0, tile, num_routes)
    else:
        routes = gl.load(route_ptr + tile * COLUMNS + column, cache_modifier=".cg")
    present = (routes < num_routes)[:, :, None]
    rows = gl.where(routes < num_routes, routes // routes_a_row, 0)[:, :, None] * x_stride
    part = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None][:, :, None]
    part += gl.program_id(2) * PARTS
    begin = gl.minimum(part * SHARE, chunks - SHARE)
    inputs = begin * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))[None, :][None, :, :]
    return x_ptr, rows + inputs, inputs, part * SHARE - begin, present


@gluon.jit
def _copy_x(slot, x, chunk, K, SHARE: gl.constexpr):
    """Start to copy each part's chunk: zeros where it is another part's, or past the last input."""
    x_ptr, places, inputs, before, present = x
    CHUNK: gl.constexpr = places.shape[2]
    mask = present & (inputs < K - chunk * CHUNK) & (chunk >= before) & (chunk < SHARE)
    async_copy.async_copy_global_to_shared(slot, x_ptr + (places + chunk * CHUNK), mask=mask)
    async_copy.commit_group()


@gluon.jit
def _store(
    acc,
    up_acc,
    bias_ptr,
    expert_weight_ptr,
    out_ptr,
    route_ptr,
    tile,
    num_routes,
    expert_rows,
    first,
    N,
    ACTIVATION: gl.constexpr,
    LIMIT: gl.constexpr,
    BLOCK_N: gl.constexpr,
    COLUMNS: gl.constexpr,
    MMA: gl.constexpr,
):
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, MMA))
    if route_ptr is None:
        routes = gl.where(column == 0, tile, num_routes)
    else:
        routes = gl.load(route_ptr + tile * COLUMNS + column, cache_modifier=".cg")
    present = routes < num_routes
    outputs = first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, MMA))
    split = gl.program_id(2)
    offsets = (split.to(gl.int64) * num_routes + routes)[None, :] * N + outputs[:, None]
    up = N if ACTIVATION >= 0 else BLOCK_N
    if bias_ptr is not None:
        biases = bias_ptr + expert_rows + outputs
        inside = (outputs < N) & (split == 0)
        acc += gl.load(biases, mask=inside, other=0.0)[:, None]
        up_inside = inside if ACTIVATION >= 0 else inside & (outputs + BLOCK_N < N)
        up_acc += gl.load(biases + up, mask=up_inside, other=0.0)[:, None]
    mask = (outputs < N)[:, None] & present[None, :]
    if ACTIVATION >= 0:
        hidden = activate_times(acc, up_acc, ACTIVATION, LIMIT)
        gl.store(out_ptr + offsets, hidden.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        factors = gl.load(expert_weight_ptr + routes, mask=present, other=0.0, cache_modifier=".cg")[None, :]
        gl.store(out_ptr + offsets, (acc * factors).to(out_ptr.dtype.element_ty), mask=mask)
        up_mask = (outputs + BLOCK_N < N)[:, None] & present[None, :]
        gl.store(out_ptr + offsets + BLOCK_N, (up_acc * factors).to(out_ptr.dtype.element_ty), mask=up_mask)
