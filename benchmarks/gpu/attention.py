"""Attention kernels on a GPU: are they right, how fast are they, which launch is the fastest.

    python -m benchmarks.gpu.attention [--only decode,prefill,write,mla] [--sweep]

First a check of each kernel as compiled, on odd shapes, against plain torch in fp32. Then one line a case: time, what
that is in TB/s or TFLOP/s, and the share of what a copy or a GEMM reaches in the same run. Lengths and heads
are those of Llama-3.1-8B (32 heads, 8 KV heads of 128) and, for the latent cache, of DeepSeek-V3 (128 heads)."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from quire.ops.gpu.attention.decode import DecodeLaunch, decode, decode_launch, num_tiles, tile_rows
from quire.ops.gpu.attention.dense import dense_prefill
from quire.ops.gpu.attention.kv_write import kv_write
from quire.ops.gpu.attention.mla import MLALaunch, mla_decode, mla_launch
from quire.ops.gpu.attention.pages import Pages, Runs, Scoring
from quire.ops.gpu.attention.plan import MIN_SPLIT_LENGTH, num_workers, plan_decode, plan_prefill
from quire.ops.gpu.attention.prefill import PrefillLaunch, prefill, prefill_launch
from quire.ops.reference.cache import quantize_kv

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LATENT, TURNED = 512, 64
MAX_LEN = 32768
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
WORKING_SET = 256 << 20  # bytes that a case's launches read in turn: several times the L2
REPLAYS = 7

Launches = list[Callable[[], Tensor]]


# -- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Ceilings:
    copy: float  # bytes/s, read and written
    matrix: float  # bf16 flop/s


@dataclass
class Results:
    ceilings: Ceilings
    rows: list[dict[str, float | str]] = field(default_factory=list)

    def add(self, name: str, seconds: float, num_bytes: float = 0.0, flop: float = 0.0, note: str = "") -> None:
        line = f"{name:58s} {seconds * 1e6:10.1f} us"
        if num_bytes:
            line += f" {num_bytes / seconds / 1e12:7.2f} TB/s {num_bytes / seconds / self.ceilings.copy:5.0%} of a copy"
        if flop:
            line += f" {flop / seconds / 1e12:7.0f} TFLOP/s {flop / seconds / self.ceilings.matrix:5.0%} of a GEMM"
        print(f"{line}  {note}", flush=True)
        self.rows.append({"case": name, "us": seconds * 1e6, "bytes": num_bytes, "flop": flop, "note": note})


def seconds_of(launches: Launches) -> float:
    """Median time of one launch, of a graph that holds them all."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(REPLAYS + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(launches))
    return statistics.median(times[2:])


def measure_ceilings() -> Ceilings:
    source = torch.randn(1 << 29, device="cuda").to(BF16)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / seconds_of([lambda: torch.neg(source, out=target)] * 5)  # in graphs, copy_ is slower
    a, b = torch.randn(2, 8192, 8192, device="cuda").to(BF16)
    matrix = 2 * 8192**3 / seconds_of([lambda: a @ b] * 5)
    return Ceilings(copy, matrix)


# -- inputs -----------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """Sequences of (context, queries), on shuffled pages of `layers` layers."""

    lengths: list[tuple[int, int]]
    kept: torch.dtype = BF16
    block_size: int = 16
    layers: int = 1
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM
    heads_first: bool = False  # pages [blocks, kv_heads, block_size, head_dim] instead

    def __post_init__(self) -> None:
        counts = [-(-context // self.block_size) for context, _ in self.lengths]
        order = torch.randperm(sum(counts)).int().split(counts)
        tables = torch.zeros(len(counts), max(max(counts), MAX_LEN // self.block_size), dtype=torch.int32)
        for seq, blocks in enumerate(order):
            tables[seq, : len(blocks)] = blocks
        starts = torch.tensor([0, *(queries for _, queries in self.lengths)]).cumsum(0).int()
        contexts = torch.tensor([context for context, _ in self.lengths]).int()
        self.runs = Runs(starts.cuda(), contexts.cuda(), tables.cuda())
        self.num_tokens = int(starts[-1])
        self.q = torch.randn(self.num_tokens, self.heads, self.head_dim, device="cuda").to(BF16)
        self.pages = [self._pages(sum(counts)) for _ in range(self.layers)]

    def _pages(self, blocks: int) -> Pages:
        shape = (blocks, self.block_size, self.kv_heads, self.head_dim)
        if self.heads_first:
            shape = (blocks, self.kv_heads, self.block_size, self.head_dim)
        k, v = (torch.randn(shape, device="cuda", dtype=BF16) for _ in range(2))
        if self.heads_first:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        if self.kept == torch.int8:
            return Pages(*quantize_kv(k.float(), v.float()))
        return Pages(k.to(self.kept), v.to(self.kept), k_fp8_scale=1.25, v_fp8_scale=0.75)

    def plain(self, layer: int, scoring: Scoring) -> Tensor:
        """In fp32, of what the pages hold."""
        pages, out, starts = self.pages[layer], [], self.runs.seq_starts.tolist()
        for seq, (context, queries) in enumerate(self.lengths):
            blocks = self.runs.block_tables[seq, : -(-context // self.block_size)].long()
            k, v = (x[blocks].flatten(0, 1)[:context].float() for x in (pages.k, pages.v))
            if pages.k_scales is not None and pages.v_scales is not None:
                k = k * pages.k_scales[blocks].flatten(0, 1)[:context, :, None]
                v = v * pages.v_scales[blocks].flatten(0, 1)[:context, :, None]
            k, v = k * pages.k_fp8_scale, v * pages.v_fp8_scale
            q = self.q[starts[seq] : starts[seq + 1]].float().unflatten(1, (self.kv_heads, -1))
            scores = torch.einsum("nkgd,mkd->kgnm", q, k) * scoring.scale
            if scoring.soft_cap:
                scores = scoring.soft_cap * torch.tanh(scores / scoring.soft_cap)
            distance = torch.arange(context - queries, context, device="cuda")[:, None] - torch.arange(
                context, device="cuda"
            )
            if scoring.slopes is not None:
                scores = scores - scoring.slopes.unflatten(0, (self.kv_heads, -1))[..., None, None] * distance
            hidden = (distance < 0) | ((distance >= scoring.window) if scoring.window else (distance < 0))
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out.append(torch.einsum("kgnm,mkd->nkgd", weights, v).flatten(1, 2))
        return torch.cat(out)

    @property
    def kv_bytes(self) -> int:
        """Read for one layer's decode."""
        number = torch.empty(0, dtype=self.kept).element_size()
        unit = 4 if self.kept == torch.int8 else 0
        return 2 * sum(context for context, _ in self.lengths) * self.kv_heads * (self.head_dim * number + unit)

    @property
    def flop(self) -> float:
        """Of the scores that some query sees."""
        seen = sum(queries * (2 * context - queries + 1) / 2 for context, queries in self.lengths)
        return 4.0 * seen * self.heads * self.head_dim


def layers_for(lengths: list[tuple[int, int]], bytes_a_position: int) -> int:
    return max(1, min(32, -(-WORKING_SET // (sum(context for context, _ in lengths) * bytes_a_position))))


SCORING = Scoring(HEAD_DIM**-0.5)


# -- decoding ---------------------------------------------------------------------------------------------------------


def decode_launches(
    step: Step,
    scoring: Scoring = SCORING,
    min_length: int = MIN_SPLIT_LENGTH,
    launch: DecodeLaunch | None = None,
    split_contexts: bool = True,
):
    queries = max(queries for _, queries in step.lengths)
    group = step.heads // step.kv_heads
    rows = tile_rows(group, queries)
    per = (launch or decode_launch(step.head_dim, rows, step.kept, step.runs.num_seqs)).per_multiprocessor
    lanes = step.kv_heads * num_tiles(group, queries)
    workers = num_workers(step.q.device, per, lanes, step.runs.num_seqs, MAX_LEN)
    plan = plan_decode(
        step.runs,
        workers,
        max_queries=queries,
        window=scoring.window,
        min_length=min_length,
        split_contexts=split_contexts,
    )
    return [lambda p=pages: decode(step.q, p, step.runs, plan, scoring, launch=launch) for pages in step.pages]


def decode_cases() -> Iterator[tuple[str, Step, Scoring]]:
    mixed = [(int(n), 1) for n in torch.randint(100, 4000, (128,), generator=torch.Generator().manual_seed(1))]
    for name, lengths, kept, block_size in [
        ("1 x 128", [(128, 1)], BF16, 16),
        ("1 x 4k", [(4096, 1)], BF16, 16),
        ("1 x 32k", [(32768, 1)], BF16, 16),
        ("32 x 1k", [(1024, 1)] * 32, BF16, 16),
        ("32 x 16k", [(16384, 1)] * 32, BF16, 16),
        ("32 x 16k, blocks of 64", [(16384, 1)] * 32, BF16, 64),
        ("256 x 1k", [(1024, 1)] * 256, BF16, 16),
        ("256 x 2k", [(2048, 1)] * 256, BF16, 16),
        ("128 x 100 .. 4000", mixed, BF16, 16),
        ("32 x 16k, 4 queries", [(16384, 4)] * 32, BF16, 16),
        ("32 x 16k, fp8", [(16384, 1)] * 32, FP8, 16),
        ("256 x 1k, fp8", [(1024, 1)] * 256, FP8, 16),
        ("32 x 16k, int8", [(16384, 1)] * 32, torch.int8, 16),
    ]:
        layers = layers_for(lengths, 2 * KV_HEADS * HEAD_DIM * torch.empty(0, dtype=kept).element_size())
        yield f"decode {name}", Step(lengths, kept, block_size, layers), SCORING
    yield "decode 32 x 16k, heads before slots", Step([(16384, 1)] * 32, heads_first=True), SCORING
    yield "decode 32 x 16k, window of 4k", Step([(16384, 1)] * 32), Scoring(SCORING.scale, window=4096)


def time_decode(results: Results) -> None:
    for name, step, scoring in decode_cases():
        share = min(1.0, scoring.window / step.lengths[0][0]) if scoring.window else 1.0
        with guarded(name):
            results.add(name, seconds_of(decode_launches(step, scoring)), num_bytes=step.kv_bytes * share)


DECODE_SHAPES = (  # positions a round, warps, stages
    *((32, 2, 5), (32, 4, 4), (32, 4, 6), (64, 2, 4), (64, 4, 3), (64, 4, 4), (64, 4, 5), (64, 8, 4)),
    *((128, 4, 3), (128, 8, 3), (128, 4, 4), (128, 8, 4)),
)


def sweep_decode() -> None:
    for name, lengths, kept in [
        ("32 x 16k", [(16384, 1)] * 32, BF16),
        ("256 x 1k", [(1024, 1)] * 256, BF16),
        ("32 x 16k, fp8", [(16384, 1)] * 32, FP8),
    ]:
        step, timings = Step(lengths, kept), []
        for block_n, warps, stages in DECODE_SHAPES:
            for per in (1, 2, 3, 4):
                launch = DecodeLaunch(block_n, warps, stages, per)
                with guarded(f"decode {name} {launch}"):
                    timings.append((seconds_of(decode_launches(step, launch=launch)), launch, MIN_SPLIT_LENGTH))
        best = min(timings, key=lambda x: x[0])[1]
        for min_length in (128, 256, 1024):
            with guarded(f"decode {name} min_length {min_length}"):
                timings.append(
                    (seconds_of(decode_launches(step, min_length=min_length, launch=best)), best, min_length)
                )
        print_best(f"decode {name}", timings)


# -- prompts ----------------------------------------------------------------------------------------------------------


def prefill_launches(step: Step, scoring: Scoring = SCORING, launch: PrefillLaunch | None = None) -> Launches:
    launch = launch or prefill_launch(step.head_dim, step.heads, step.kv_heads, BF16)
    plan = plan_prefill(step.runs, step.num_tokens, launch.tile(step.heads, step.kv_heads))
    return [lambda p=pages: prefill(step.q, p, step.runs, plan, scoring, launch=launch) for pages in step.pages]


def time_prefill(results: Results) -> None:
    for name, lengths, kept in [
        ("2k", [(2048, 2048)], BF16),
        ("8k", [(8192, 8192)], BF16),
        ("4 x 2k", [(2048, 2048)] * 4, BF16),
        ("64 x 128", [(128, 128)] * 64, BF16),
        ("2k at the end of 16k", [(16384, 2048)], BF16),
        ("8k, fp8", [(8192, 8192)], FP8),
    ]:
        step = Step(lengths, kept)
        with guarded(name):
            results.add(f"prefill {name}", seconds_of(prefill_launches(step) * 4), flop=step.flop)
    for length in (2048, 8192):
        step = Step([(length, length)])
        k, v = torch.randn(2, length, KV_HEADS, HEAD_DIM, device="cuda").to(BF16)
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            name = f"torch {backend.name.lower()} {length // 1024}k"
            with guarded(name):
                run = lambda b=backend, k=k, v=v, s=step: dense_prefill(s.q, k, v, [len(k)], SCORING.scale, b)  # noqa: E731
                results.add(name, seconds_of([run] * 4), flop=step.flop)


PREFILL_SHAPES = (  # rows, positions a round, warps, stages, registers
    *((128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3), (128, 32, 8, 4)),
    *((128, 32, 8, 3, 128), (128, 32, 8, 4, 128), (128, 64, 8, 2, 128), (128, 64, 4, 2), (128, 32, 4, 3)),
    *((64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (64, 128, 4, 3), (64, 32, 4, 4)),
)


def sweep_prefill() -> None:
    step, timings = Step([(8192, 8192)]), []
    for shape in PREFILL_SHAPES:
        launch = PrefillLaunch(*shape)
        with guarded(f"prefill 8k {launch}"):
            timings.append((seconds_of(prefill_launches(step, launch=launch) * 2), launch, 0))
    print_best("prefill 8k", timings)


# -- writing ----------------------------------------------------------------------------------------------------------


def time_write(results: Results) -> None:
    for tokens, kept in [(1, BF16), (256, BF16), (8192, BF16), (8192, FP8), (8192, torch.int8)]:
        step = Step([(max(tokens, 16), 1)], kept)
        row = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        qkv = torch.randn(tokens, row, device="cuda").to(BF16)
        angles = torch.randn(tokens, HEAD_DIM, device="cuda")
        slots = torch.randperm(tokens, device="cuda").int()
        number = torch.empty(0, dtype=kept).element_size()
        num_bytes = tokens * (4 * HEAD_DIM + (row + HEADS * HEAD_DIM) * 2 + 2 * KV_HEADS * HEAD_DIM * number)
        with guarded(f"write {tokens} {kept}"):
            parts = qkv.split([n * HEAD_DIM for n in (HEADS, KV_HEADS, KV_HEADS)], dim=1)
            run = lambda s=step, x=(*parts, angles, slots): kv_write(*x, s.pages[0])  # noqa: E731
            results.add(f"write {tokens} tokens, {kept}", seconds_of([run] * 10), num_bytes=num_bytes)


# -- a latent cache ---------------------------------------------------------------------------------------------------


def latent_step(num_seqs: int, context: int, heads: int, kept: torch.dtype) -> tuple[Tensor, Tensor, Runs]:
    step = Step([(context, 1)] * num_seqs, block_size=64, heads=1, kv_heads=1, head_dim=16)
    cache = torch.randn(len(step.pages[0].k), 64, LATENT + TURNED, device="cuda").to(BF16).to(kept)
    return torch.randn(num_seqs, heads, LATENT + TURNED, device="cuda").to(BF16), cache, step.runs


def mla_run(
    q: Tensor, cache: Tensor, runs: Runs, min_length: int = MIN_SPLIT_LENGTH, launch: MLALaunch | None = None
) -> Callable[[], Tensor]:
    launch = launch or mla_launch(q.shape[1], q.dtype)
    workers = num_workers(q.device, launch.per_multiprocessor, launch.tiles(q.shape[1]), runs.num_seqs, MAX_LEN)
    plan = plan_decode(runs, workers, min_length=min_length)
    return lambda: mla_decode(q, cache, runs, plan, 0.05, launch=launch)


def time_mla(results: Results) -> None:
    for seqs, context, heads, kept in [
        (1, 4096, 128, BF16),
        (32, 16384, 128, BF16),
        (32, 16384, 16, BF16),
        (256, 2048, 128, BF16),
        (32, 16384, 128, FP8),
    ]:
        q, cache, runs = latent_step(seqs, context, heads, kept)
        flop = 2.0 * seqs * context * heads * (2 * LATENT + TURNED)
        name = f"latent {seqs} x {context}, {heads} heads, {kept}"
        with guarded(name):
            num_bytes = seqs * context * (LATENT + TURNED) * cache.element_size()
            results.add(name, seconds_of([mla_run(q, cache, runs)] * 2), num_bytes=num_bytes, flop=flop)


MLA_SHAPES = {  # heads: rows, positions a round, warps, stages
    128: ((64, 16, 8, 4), (64, 32, 8, 2), (64, 32, 8, 3), (64, 32, 8, 4), (64, 64, 8, 2)),
    16: ((16, 32, 4, 2), (16, 32, 4, 3), (16, 32, 4, 4), (16, 64, 4, 2), (16, 64, 8, 3), (16, 32, 8, 3)),
}


def sweep_mla() -> None:
    for heads in (128, 16):
        (q, cache, runs), timings = latent_step(32, 16384, heads, BF16), []
        for rows, block_n, warps, stages in MLA_SHAPES[heads]:
            for per in (1, 2):
                launch = MLALaunch(rows, block_n, warps, stages, per)
                with guarded(f"latent {heads} heads {launch}"):
                    timings.append((seconds_of([mla_run(q, cache, runs, launch=launch)]), launch, MIN_SPLIT_LENGTH))
        best = min(timings, key=lambda x: x[0])[1]
        for min_length in (128, 256, 1024):
            with guarded(f"latent min_length {min_length}"):
                timings.append((seconds_of([mla_run(q, cache, runs, min_length, best)]), best, min_length))
        print_best(f"latent 32 x 16k, {heads} heads", timings)


# -- right ------------------------------------------------------------------------------------------------------------


def check() -> None:
    """Relative error of the root of mean squares, against plain torch in fp32 on the same bf16 or 8-bit inputs."""
    odd = [(1, 1), (777, 1), (512, 1), (513, 1), (3001, 1)]
    drafts = [(5, 5), (777, 3), (1500, 8)]
    prompts = [(300, 300), (1, 1), (777, 100), (64, 64)]
    slopes = 2.0 ** -torch.arange(1, 9, device="cuda").float()
    everything = Scoring(0.1, window=300, soft_cap=5.0, slopes=slopes)
    cases = [
        (odd, BF16, 16, 32, 8, 128, SCORING),
        (odd, FP8, 16, 32, 8, 128, SCORING),
        (odd, torch.int8, 16, 32, 8, 128, SCORING),
        (odd, BF16, 64, 6, 2, 80, Scoring(0.1)),
        (odd, BF16, 8, 8, 1, 256, Scoring(0.06)),
        (odd, BF16, 16, 8, 2, 64, everything),
        (drafts, BF16, 16, 8, 2, 128, Scoring(0.1, window=300)),
        (prompts, BF16, 16, 32, 8, 128, SCORING),
        (prompts, FP8, 16, 32, 8, 128, SCORING),
        (prompts, torch.int8, 16, 32, 8, 128, SCORING),
        (prompts, BF16, 32, 3, 1, 96, Scoring(0.1)),
        (prompts, BF16, 16, 8, 2, 64, everything),
        (prompts, BF16, 16, 8, 1, 256, Scoring(0.06)),
    ]
    for lengths, kept, block_size, heads, kv_heads, head_dim, scoring in cases:
        kind = "prefill" if lengths is prompts else "decode"
        name = f"{kind} {heads}/{kv_heads} x {head_dim}, {kept}, blocks of {block_size}, {scoring.window=}"
        with guarded(name):
            step = Step(lengths, kept, block_size, 1, heads, kv_heads, head_dim)
            launches = (prefill_launches if lengths is prompts else decode_launches)(step, scoring)
            out, truth = launches[0](), step.plain(0, scoring)
            verdict(name, out, truth)
    with guarded("decode alone = decode in a batch"):
        step = Step(odd)
        whole = decode_launches(step, split_contexts=False)[0]()
        same = True
        for seq in range(len(odd)):
            runs = Runs(
                step.runs.seq_starts[:2], step.runs.context_lens[seq : seq + 1], step.runs.block_tables[seq : seq + 1]
            )
            plan = plan_decode(runs, 1, split_contexts=False)
            alone = decode(step.q[seq : seq + 1].clone(), step.pages[0], runs, plan, SCORING)
            same &= torch.equal(alone[0], whole[seq])
        print(f"{'ok   ' if same else 'WRONG'} decode alone = decode in a batch", flush=True)
    for heads, kept in ((128, BF16), (16, BF16), (128, FP8)):
        with guarded(f"latent {heads} {kept}"):
            q, cache, runs = latent_step(3, 1234, heads, kept)
            out = mla_run(q, cache, runs)()
            rows = [cache[runs.block_tables[s, :20].long()].flatten(0, 1)[:1234].float() for s in range(3)]
            truth = torch.stack(
                [(x.float() @ r.T * 0.05).softmax(-1) @ r[:, :LATENT] for x, r in zip(q, rows, strict=True)]
            )
            verdict(f"latent {heads} heads, {kept}", out, truth)


def verdict(name: str, out: Tensor, truth: Tensor) -> None:
    error = float((out.float() - truth).norm() / truth.norm())
    print(f"{'ok   ' if error < 1e-2 else 'WRONG'} {name}: {error:.1e}", flush=True)  # NaN is wrong too


class guarded:
    """A case that fails is printed, and the next one runs."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            print(f"FAILED {self.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return isinstance(error, Exception)


def print_best(name: str, timings: list[tuple[float, object, int]]) -> None:
    for seconds, launch, min_length in sorted(timings, key=lambda x: x[0])[:4]:
        print(f"best for {name}: {seconds * 1e6:.1f} us {launch} min_length={min_length}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="check,decode,prefill,write,mla")
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    only = args.only.split(",")
    torch.manual_seed(0)
    begin = time.monotonic()
    results = Results(measure_ceilings())
    print(f"copy {results.ceilings.copy / 1e12:.2f} TB/s, GEMM {results.ceilings.matrix / 1e12:.0f} TFLOP/s")
    print(f"launches: {decode_launch(HEAD_DIM, 16, BF16, 32)} {prefill_launch(HEAD_DIM, HEADS, KV_HEADS, BF16)}")
    print(f"launches: {mla_launch(128, BF16)}")
    if "check" in only:
        check()
    timed = {"decode": time_decode, "prefill": time_prefill, "write": time_write, "mla": time_mla}
    swept = {"decode": sweep_decode, "prefill": sweep_prefill, "mla": sweep_mla}
    for name, run in timed.items():
        if name in only:
            run(results)
            print(f"-- {time.monotonic() - begin:.0f} s", flush=True)
    for name, sweep in swept.items():
        if args.sweep and name in only:
            sweep()
            print(f"-- {time.monotonic() - begin:.0f} s", flush=True)
    print(json.dumps({"device": torch.cuda.get_device_name(), "results": results.rows}))


if __name__ == "__main__":
    main()
