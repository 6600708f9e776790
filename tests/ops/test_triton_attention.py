"""Triton attention beside plain torch in fp32: interpreted where there is no GPU, compiled where there is one."""

from dataclasses import asdict, dataclass, field
from itertools import pairwise

import pytest
import torch

from quire.ops.gpu.attention.decode import decode
from quire.ops.gpu.attention.dense import dense_prefill
from quire.ops.gpu.attention.kv_write import kv_write
from quire.ops.gpu.attention.mla import MLALaunch, mla_decode
from quire.ops.gpu.attention.pages import Pages, Runs, Scoring
from quire.ops.gpu.attention.plan import plan_decode, plan_prefill
from quire.ops.gpu.attention.prefill import PrefillLaunch, invariant_launch, prefill
from quire.ops.kv_spec import KVSpec
from quire.ops.reference import TorchOps
from quire.ops.reference.cache import TorchCache, quantize_kv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORKERS, MIN_LENGTH = 3, 64  # small, so that short contexts have several pieces
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}  # relative, root of mean squares


def runs_of(lengths: list[tuple[int, int]], tables: torch.Tensor | None = None) -> Runs:
    starts = torch.tensor([0, *(queries for _, queries in lengths)]).cumsum(0).int()
    contexts = torch.tensor([context for context, _ in lengths]).int()
    tables = torch.zeros(len(lengths), 1, dtype=torch.int32) if tables is None else tables
    return Runs(starts.to(DEVICE), contexts.to(DEVICE), tables.to(DEVICE))


@dataclass
class Case:
    """A step: lengths [(context, queries)] of its sequences, on shuffled pages with rubbish in what no kernel may
    read."""

    lengths: list[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    kept: torch.dtype = torch.float32
    seed: int = 0
    scoring: Scoring = field(default_factory=lambda: Scoring(0.1))
    k_fp8_scale: float = 1.0
    v_fp8_scale: float = 1.0

    def __post_init__(self) -> None:
        make = torch.Generator().manual_seed(self.seed)
        self.blocks = [-(-context // self.block_size) for context, _ in self.lengths]
        order = torch.randperm(sum(self.blocks) + 1, generator=make)[1:].int()
        tables = torch.full((len(self.lengths), max(self.blocks) + 1), 2**30, dtype=torch.int32)  # wild past the end
        shape = (sum(self.blocks) + 1, self.block_size, self.kv_heads, self.head_dim)
        k, v = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        self.k, self.v, used = [], [], 0
        for seq, (context, _) in enumerate(self.lengths):
            tables[seq, : self.blocks[seq]] = own = order[used : used + self.blocks[seq]]
            used += self.blocks[seq]
            for page, kept in ((k, self.k), (v, self.v)):
                made = torch.randn(context, self.kv_heads, self.head_dim, generator=make)
                kept.append(made)
                for position in range(context):
                    page[own[position // self.block_size], position % self.block_size] = made[position]
        self.runs = runs_of(self.lengths, tables)
        self.q = (
            torch.randn(sum(queries for _, queries in self.lengths), self.heads, self.head_dim, generator=make)
            .to(self.dtype)
            .to(DEVICE)
        )
        self.pages = self._stored(k, v)

    def __str__(self) -> str:
        kinds = f"{self.heads}/{self.kv_heads}x{self.head_dim}-{self.dtype}-{self.kept}".replace("torch.", "")
        options = asdict(self.scoring).items()
        numbers = [f"{name}={value}" for name, value in options if not isinstance(value, torch.Tensor) and value]
        return "-".join([kinds, *numbers, *(name for name, value in options if isinstance(value, torch.Tensor))])

    def _stored(self, k: torch.Tensor, v: torch.Tensor) -> Pages:
        if self.kept == torch.int8:
            q = [x.to(DEVICE) for x in quantize_kv(k, v)]
            own = [[quantize_kv(a, b) for a, b in zip(self.k, self.v, strict=True)]]
            self.k = [c[0].float() * c[2][..., None] for c in own[0]]
            self.v = [c[1].float() * c[3][..., None] for c in own[0]]
            return Pages(*q)
        k, v = (k / self.k_fp8_scale).to(self.kept), (v / self.v_fp8_scale).to(self.kept)
        self.k = [(x / self.k_fp8_scale).to(self.kept).float() * self.k_fp8_scale for x in self.k]
        self.v = [(x / self.v_fp8_scale).to(self.kept).float() * self.v_fp8_scale for x in self.v]
        return Pages(k.to(DEVICE), v.to(DEVICE), k_fp8_scale=self.k_fp8_scale, v_fp8_scale=self.v_fp8_scale)

    def plain(self, trees: list[list[int]] | None = None) -> torch.Tensor:
        """In fp32. trees: each draft's parent in its run, -1 for the first."""
        out = []
        for seq, (context, queries) in enumerate(self.lengths):
            at = sum(n for _, n in self.lengths[:seq])
            q = self.q[at : at + queries].float().cpu()
            key_pos = torch.arange(context)
            query_pos = torch.arange(context - queries, context)
            if trees:
                depths = []
                for parent in trees[seq]:
                    depths.append(depths[parent] + 1 if parent >= 0 else 0)
                query_pos = context - queries + torch.tensor(depths)
                key_pos[context - queries :] = query_pos
            distance = query_pos[:, None] - key_pos
            seen = torch.ones_like(distance).bool()
            if self.scoring.window > 0:
                seen = distance < self.scoring.window
            elif self.scoring.window < 0:
                seen = key_pos // -self.scoring.window == query_pos[:, None] // -self.scoring.window
            if trees:
                for i in range(queries):
                    line = [i]
                    while trees[seq][line[-1]] >= 0:
                        line.append(trees[seq][line[-1]])
                    seen[i, context - queries :] &= torch.tensor([j in line for j in range(queries)])
            else:
                seen &= distance >= 0
            group = self.heads // self.kv_heads
            k, v = (x[seq].repeat_interleave(group, 1) for x in (self.k, self.v))
            scores = torch.einsum("nhd,mhd->hnm", q, k) * self.scoring.scale
            if self.scoring.soft_cap:
                scores = self.scoring.soft_cap * torch.tanh(scores / self.scoring.soft_cap)
            if self.scoring.slopes is not None:
                scores = scores - self.scoring.slopes.cpu()[:, None, None] * distance
            if self.scoring.biases is not None:
                reach = self.scoring.reach
                scores = scores + self.scoring.biases.cpu()[:, (-distance).clamp(-reach, reach) + reach]
            scores = scores.masked_fill(~seen, -torch.inf)
            if self.scoring.sinks is not None:
                sinks = self.scoring.sinks.cpu()[:, None, None].expand(-1, queries, 1)
                scores = torch.cat([scores, sinks], dim=-1)
            weights = scores.softmax(-1)[..., :context]
            out.append(torch.einsum("hnm,mhd->nhd", weights, v))
        return torch.cat(out)

    def decode(self, max_queries: int = 1, **more: torch.Tensor) -> torch.Tensor:
        plan = plan_decode(
            self.runs, WORKERS, max_queries=max_queries, window=self.scoring.window, min_length=MIN_LENGTH
        )
        return decode(self.q, self.pages, self.runs, plan, self.scoring, **more)

    def prefill(self, above: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
        launch = PrefillLaunch(64, 32, 4, 2)
        plan = plan_prefill(self.runs, len(self.q), launch.tile(self.heads, self.kv_heads), above=above)
        return prefill(self.q, self.pages, self.runs, plan, self.scoring, out=out, launch=launch)

    def error(self, out: torch.Tensor, **plain) -> float:
        truth = self.plain(**plain)
        return float((out.float().cpu() - truth).norm() / truth.norm())


def slopes(heads: int) -> torch.Tensor:
    return (2.0 ** -torch.arange(1, heads + 1)).to(DEVICE)


def biases(heads: int, reach: int) -> torch.Tensor:
    return torch.randn(heads, 2 * reach + 1, generator=torch.Generator().manual_seed(2)).to(DEVICE)


LENGTHS = [(1, 1), (100, 1)]


@pytest.mark.parametrize(
    "case",
    [
        Case([(1, 1), (63, 1), (64, 1), (129, 1)]),
        Case(LENGTHS[1:], heads=2, kv_heads=2, head_dim=80),
        Case(LENGTHS[1:], heads=6, kv_heads=2, head_dim=96, block_size=32),
        Case(LENGTHS[1:], heads=16, kv_heads=2, head_dim=128, block_size=64),
        Case(LENGTHS, kv_heads=1, head_dim=256, block_size=8),
        Case(LENGTHS, kv_heads=1, dtype=torch.bfloat16, kept=torch.bfloat16),
        Case(LENGTHS, kv_heads=1, dtype=torch.float16, kept=torch.float16),
        Case(LENGTHS, kv_heads=1, dtype=torch.bfloat16, kept=torch.int8),
        Case(LENGTHS, kv_heads=1, dtype=torch.float16, kept=torch.float8_e4m3fn, k_fp8_scale=0.05, v_fp8_scale=0.02),
        Case(LENGTHS, kv_heads=1, scoring=Scoring(0.1, window=1)),
        Case(LENGTHS, kv_heads=1, scoring=Scoring(0.1, window=40)),
        Case([(1, 1), (39, 1), (40, 1), (41, 1), (150, 1)], kv_heads=1, scoring=Scoring(0.1, window=-40)),
        Case([(193, 1), (200, 1)], dtype=torch.float16, kept=torch.int8, scoring=Scoring(0.1, window=-64)),
        Case(LENGTHS, kv_heads=1, scoring=Scoring(0.5, soft_cap=2.0)),
        Case(LENGTHS, kv_heads=1, scoring=Scoring(0.1, slopes=slopes(4))),
        Case(LENGTHS, kv_heads=1, scoring=Scoring(0.3, window=70, soft_cap=3.0, slopes=slopes(4))),
        Case([(1, 1), (64, 1), (200, 1)], kv_heads=2, scoring=Scoring(0.3, sinks=8 * slopes(4) - 1)),
        Case(LENGTHS, kv_heads=1, scoring=Scoring(0.3, window=40, sinks=8 * slopes(4) - 1)),
        Case(LENGTHS, kv_heads=2, scoring=Scoring(0.3, biases=biases(4, reach=17))),
    ],
    ids=str,
)
def test_decode_is_attention(case):
    assert case.error(case.decode()) < BOUNDS[case.dtype]


@pytest.mark.parametrize("window", [0, 20, -21])
def test_drafts_see_what_comes_before_them(window):
    case = Case([(3, 3), (66, 5), (64, 8)], heads=3, kv_heads=1, scoring=Scoring(0.2, window=window))
    assert case.error(case.decode(max_queries=8)) < BOUNDS[case.dtype]


@pytest.mark.parametrize(
    "scoring", [Scoring(0.2), Scoring(0.2, window=12), Scoring(0.2, window=-5), Scoring(0.2, slopes=slopes(4))]
)
def test_drafts_may_form_a_tree(scoring):
    case = Case([(70, 7), (5, 4), (40, 1)], kv_heads=1, scoring=scoring)
    check_trees(case, [[-1, 0, 0, 1, 1, 2, 5], [-1, -1, 0, 1], [-1]], max_queries=8)


@pytest.mark.parametrize("heads", [4, 3])
def test_a_large_tree_becomes_several_tiles(heads):
    """Of 16 queries each, or 21; a sequence may have fewer than all tiles."""
    case = Case([(100, 38), (30, 17), (40, 1)], heads=heads, kv_heads=1)
    trees = [[-1, *[(node - 1) // 2 for node in range(1, queries)]] for _, queries in case.lengths]
    check_trees(case, trees, max_queries=64)


def check_trees(case, trees, max_queries):
    words, positions = [], []
    for (context, queries), parents in zip(case.lengths, trees, strict=True):
        own: list[int] = []
        depths: list[int] = []
        for i, parent in enumerate(parents):
            own.append((own[parent] if parent >= 0 else 0) | 1 << i)
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        words += own
        positions += [context - queries + depth for depth in depths]
    tree = torch.tensor(words, device=DEVICE)
    out = case.decode(max_queries, tree=tree, positions=torch.tensor(positions, device=DEVICE).int())
    assert case.error(out, trees=trees) < BOUNDS[case.dtype]


def test_a_row_does_not_depend_on_the_batch():
    case = Case([(70, 1), (1, 1), (65, 1)], heads=3, kv_heads=1, dtype=torch.bfloat16, kept=torch.bfloat16)
    plan = plan_decode(case.runs, WORKERS, split_contexts=False)
    whole = decode(case.q, case.pages, case.runs, plan, case.scoring)
    order = [2, 0, 1]
    starts = torch.arange(4, device=DEVICE).int()
    lens, tables = case.runs.context_lens, case.runs.block_tables
    shuffled = Runs(starts, lens[order], tables[order])
    plan = plan_decode(shuffled, WORKERS, split_contexts=False)
    assert torch.equal(decode(case.q[order], case.pages, shuffled, plan, case.scoring), whole[order])
    for seq in range(3):
        alone = Runs(starts[:2], lens[seq : seq + 1], tables[seq : seq + 1])
        plan = plan_decode(alone, WORKERS, split_contexts=False)
        assert torch.equal(decode(case.q[seq : seq + 1], case.pages, alone, plan, case.scoring), whole[seq : seq + 1])


RUNS = [(5, 5), (1, 1), (70, 20)]  # a prompt, a decoded token, a chunk of another prompt


@pytest.mark.parametrize(
    "case",
    [
        Case(RUNS),
        Case(RUNS, heads=3, kv_heads=1, head_dim=80),
        Case(RUNS[1:], heads=8, kv_heads=1, head_dim=96, block_size=32, dtype=torch.float16, kept=torch.float16),
        Case(RUNS[1:], kv_heads=1, dtype=torch.bfloat16, kept=torch.int8),
        Case(RUNS[1:], kv_heads=1, dtype=torch.float16, kept=torch.float8_e4m3fn, k_fp8_scale=0.05, v_fp8_scale=0.02),
        Case(RUNS, kv_heads=1, scoring=Scoring(0.1, window=1)),
        Case(RUNS, kv_heads=1, scoring=Scoring(0.1, window=37)),
        Case(RUNS, kv_heads=1, scoring=Scoring(0.1, window=-3)),
        Case([(70, 20), (170, 90)], kv_heads=1, scoring=Scoring(0.1, window=-61)),
        Case([(200, 7)], dtype=torch.float16, kept=torch.float16, scoring=Scoring(0.1, window=-64)),
        Case(RUNS[1:], kv_heads=1, scoring=Scoring(0.1, window=60, slopes=slopes(4))),
        Case(RUNS[1:], kv_heads=1, scoring=Scoring(0.5, soft_cap=2.0)),
        Case(RUNS[1:], kv_heads=1, scoring=Scoring(0.3, window=60, sinks=8 * slopes(4) - 1)),
        Case(RUNS, kv_heads=2, scoring=Scoring(0.3, biases=biases(4, reach=17))),
    ],
    ids=str,
)
def test_prefill_is_attention(case):
    assert case.error(case.prefill()) < BOUNDS[case.dtype]


@pytest.mark.parametrize("window", [0, 24, -24])
def test_chunks_give_the_bits_of_the_whole(window):
    case = Case([(3, 3), (50, 50)], heads=2, kv_heads=1, scoring=Scoring(0.2, window=window))
    whole = case.prefill()[3:]
    tables, q, done = case.runs.block_tables[1:], case.q[3:], 0
    for chunk in (19, 31):
        case.q = q[done : done + chunk]
        done += chunk
        starts = torch.tensor([0, chunk], device=DEVICE).int()
        case.runs = Runs(starts, torch.tensor([done], device=DEVICE).int(), tables)
        assert torch.equal(case.prefill(), whole[done - chunk : done])


@pytest.mark.parametrize(
    "case",
    [
        Case([(3, 3), (150, 150)], kv_heads=1, dtype=torch.bfloat16, kept=torch.bfloat16),
        Case([(3, 3), (50, 50)], kv_heads=1, scoring=Scoring(0.2, window=24)),
        Case([(3, 3), (50, 50)], kv_heads=1, scoring=Scoring(0.2, window=-16)),
        Case([(3, 3), (70, 70)], kv_heads=1, dtype=torch.float16, kept=torch.int8),
    ],
    ids=str,
)
def test_a_uniform_launch_gives_a_token_the_same_bits_alone_and_in_a_prompt(case):
    launch = invariant_launch(case.head_dim, case.heads, case.kv_heads, case.dtype)
    tile = launch.tile(case.heads, case.kv_heads)
    whole = prefill(
        case.q, case.pages, case.runs, plan_prefill(case.runs, len(case.q), tile), case.scoring, launch=launch
    )
    assert case.error(whole) < BOUNDS[case.dtype]
    length = case.lengths[1][0]
    for position in (0, 15, 16, 31, 40, length - 1):
        starts, contexts = torch.tensor([0, 1]).int().to(DEVICE), torch.tensor([position + 1]).int().to(DEVICE)
        runs = Runs(starts, contexts, case.runs.block_tables[1:])
        q = case.q[3 + position :][:1]
        alone = prefill(q, case.pages, runs, plan_prefill(runs, 1, tile), case.scoring, launch=launch)
        assert torch.equal(alone[0], whole[3 + position])


@pytest.mark.parametrize("window", [40, -40])
def test_what_no_query_sees_is_not_read(window):
    """Blocks behind a window may be others' by now, and hold what is not finite."""
    case = Case([(130, 1), (150, 7)], kv_heads=1, scoring=Scoring(0.1, window=window))
    for seq, first_query in ((0, 129), (1, 143)):
        first = first_query - 39 if window > 0 else first_query // 40 * 40
        for block in case.runs.block_tables[seq, : first // case.block_size].tolist():
            case.pages.k[block], case.pages.v[block] = torch.nan, torch.nan
    for out in (case.decode(8), case.prefill()):
        assert case.error(out) < BOUNDS[case.dtype]


def test_whole_prompts_may_go_without_pages():
    case = Case([(5, 5), (40, 40)])
    k, v = (torch.cat(x).to(DEVICE) for x in (case.k, case.v))
    assert case.error(dense_prefill(case.q, k, v, [5, 40], case.scoring.scale)) < BOUNDS[case.dtype]


def test_a_mixed_step_is_two_launches_into_one_output():
    case = Case(RUNS, kv_heads=1)
    out = torch.full_like(case.q, torch.nan)
    plan = plan_decode(case.runs, WORKERS, min_length=MIN_LENGTH)
    decode(case.q, case.pages, case.runs, plan, case.scoring, out=out)
    assert torch.isnan(out[:5]).all() and not torch.isnan(out[5]).any()
    case.prefill(above=1, out=out)
    assert case.error(out) < BOUNDS[case.dtype]


def test_padding_gives_zeros():
    case = Case([(70, 1), (33, 1)])
    padded = Runs(
        torch.tensor([0, 1, 2, 2, 3], device=DEVICE).int(),
        torch.tensor([70, 33, 0, 0], device=DEVICE).int(),
        case.runs.block_tables.repeat(2, 1),
    )
    q = torch.cat([case.q, case.q.new_full((3, 4, 64), torch.nan)])  # one of a padding sequence, two of none
    out = torch.full_like(q, torch.nan)
    plan = plan_decode(padded, WORKERS, min_length=MIN_LENGTH)
    decode(q, case.pages, padded, plan, case.scoring, out=out)
    assert case.error(out[:2]) < BOUNDS[case.dtype] and not out[2:].any()


@pytest.mark.parametrize("window", [0, 100, -100])
@pytest.mark.parametrize("split_contexts", [True, False])
@pytest.mark.parametrize(
    "lengths", [[(1000, 1)], [(0, 1), (5, 5), (64, 1), (65, 1), (640, 1)], [(7, 1)] * 300, [(9, 9)]]
)
def test_pieces_cover_every_context_once(lengths, split_contexts, window):
    runs = runs_of(lengths)
    plan = plan_decode(runs, 4, window=window, min_length=128, split_contexts=split_contexts)
    actual: dict[int, list[list[int]]] = {}
    loads = []
    for first, end in plan.ranges.tolist():
        own = [plan.pieces[piece, :5].tolist() for piece in range(first, end)]
        loads.append(sum(end - begin for _, begin, end, *_ in own))
        for seq, *rest in own:
            actual.setdefault(seq, []).append(rest)
    for seq, (context, queries) in enumerate(lengths):
        if queries > 1:
            assert seq not in actual
            continue
        parts = actual.pop(seq)
        assert [part for _, _, part, _ in parts] == list(range(len(parts)))
        assert {count for *_, count in parts} == {len(parts)} and (split_contexts or len(parts) == 1)
        first = max(context - window, 0) if window > 0 else max(context - 1, 0) // 100 * 100 if window else 0
        assert parts[0][0] == first // 64 * 64 and parts[-1][1] == context
        assert all(one[1] == other[0] for one, other in pairwise(parts))
    assert not actual
    if split_contexts:
        assert max(loads) <= max(128, -(-sum(-(-max(context, 1) // 64) * 64 for context, _ in lengths) // 256) * 64)


def rotated(qkv: torch.Tensor, angles: torch.Tensor, heads: int, kv_heads: int, head_dim: int) -> list[torch.Tensor]:
    """The specification: q and k rotated, and v, each [T, heads, head_dim] in fp32."""
    q, k, v = qkv.float().split([n * head_dim for n in (heads, kv_heads, kv_heads)], dim=-1)
    turn = TorchOps(DEVICE).rope
    return [x.unflatten(-1, (-1, head_dim)) for x in (turn(q, angles, head_dim), turn(k, angles, head_dim), v)]


def some_angles(tokens: int, rotary_dim: int) -> torch.Tensor:
    angles = torch.randn(tokens, rotary_dim // 2, generator=torch.Generator().manual_seed(1)) * 100
    return torch.cat([angles.cos(), angles.sin()], -1).to(DEVICE)


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_dim", "rotary_dim"),
    [("float32", 6, 2, 80, 80), ("bfloat16", 4, 4, 64, 16), ("float16", 3, 1, 96, 96), ("int8", 8, 2, 64, 64)],
)
def test_keys_and_values_are_stored_as_the_twin_stores_them(dtype, heads, kv_heads, head_dim, rotary_dim):
    tokens, slots = 5, [37, 3, 4, 16, 0]
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    if dtype == "int8":
        qkv[1] = 0.0
        qkv[2] *= 1e-25
        qkv[3, -3], qkv[4, heads * head_dim + 5] = torch.inf, torch.nan  # in a value, in a key
    angles = some_angles(tokens, rotary_dim)
    caches = [TorchCache(KVSpec(2, kv_heads, head_dim, 16, dtype), 3, 0, DEVICE) for _ in range(2)]
    q, k, v = rotated(qkv, angles, heads, kv_heads, head_dim)
    caches[0].write(1, torch.tensor(slots, device=DEVICE), k, v)
    pages = Pages(*(page[1] for page in caches[1].pages))
    parts = qkv.split([n * head_dim for n in (heads, kv_heads, kv_heads)], dim=1)
    out = kv_write(*parts, angles, torch.tensor(slots, device=DEVICE).int(), pages)
    torch.testing.assert_close(out, q, rtol=1e-6, atol=1e-6, equal_nan=True)
    for ours, plain in zip(caches[1].pages, caches[0].pages, strict=True):
        exact = dtype in ("int8", "float32")  # the interpreter cuts bfloat16 off where others round
        torch.testing.assert_close(ours, plain, rtol=0 if exact else 1e-2, atol=0 if exact else 1e-6, equal_nan=True)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"), [(6, 2, 80, 80), (4, 4, 64, 16), (3, 1, 24, 0)]
)
def test_heads_are_normed_before_they_turn(heads, kv_heads, head_dim, rotary_dim):
    """q, k and v lie apart here."""
    noise = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(5, n * head_dim, generator=noise).to(DEVICE) for n in (heads, kv_heads, kv_heads))
    q_norm, k_norm = (torch.randn(head_dim, generator=noise).to(DEVICE) for _ in range(2))
    angles, plain = some_angles(5, rotary_dim) if rotary_dim else None, TorchOps(DEVICE)
    k_pages, v_pages = (torch.zeros(1, 8, kv_heads, head_dim, device=DEVICE) for _ in range(2))
    slots = torch.tensor([4, 0, 7, 1, 2], device=DEVICE).int()
    out = kv_write(q, k, v, angles, slots, Pages(k_pages, v_pages), q_norm=q_norm, k_norm=k_norm, eps=1e-3)
    expected = [plain.rms_norm(x, norm, 1e-3) for x, norm in ((q, q_norm), (k, k_norm))]
    if angles is not None:
        expected = [plain.rope(x, angles, head_dim) for x in expected]
    torch.testing.assert_close(out.flatten(1), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(k_pages[0, slots.long()].flatten(1), expected[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(v_pages[0, slots.long()].flatten(1), v)


def test_keys_and_values_in_fp8_are_scaled_and_saturate():
    qkv = torch.randn(2, 3 * 32, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    qkv[1] *= 100.0
    k, v = (torch.zeros(1, 8, 1, 32, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2))
    pages = Pages(k, v, k_fp8_scale=0.5, v_fp8_scale=0.25)
    kv_write(*qkv.split(32, dim=1), None, torch.tensor([5, 2], device=DEVICE).int(), pages)
    for page, x, scale in ((k, qkv[:, 32:64], 0.5), (v, qkv[:, 64:], 0.25)):
        stored = page.float()[0, [5, 2], 0]
        near = (stored - (x / scale).clamp(-448, 448)).abs() <= x.abs() / scale / 16 + 2**-10
        assert near.float().mean() > 0.9  # Triton's interpreter loses the carry into the next power of two
        assert stored.abs().max() == 448


def test_padding_writes_nothing():
    k, v = (torch.zeros(2, 8, 1, 32, device=DEVICE) for _ in range(2))
    rows = torch.ones(3, 4 * 32, device=DEVICE).split([64, 32, 32], dim=1)
    kv_write(*rows, None, torch.tensor([-1, 9, -1], device=DEVICE).int(), Pages(k, v))
    for page in (k, v):
        written = page.flatten(0, 1)[:, 0].any(-1)
        assert written.nonzero().tolist() == [[9]]


@pytest.mark.parametrize("max_queries", [1, 3])
def test_heads_share_a_latent_cache(max_queries):
    """As attention with one KV head whose values are the first numbers of its keys."""
    case = Case([(70, max_queries), (1, 1)], heads=20, kv_heads=1, head_dim=48, dtype=torch.float16)
    latent, scale = case.pages.k[:, :, 0].nan_to_num(0.0), case.scoring.scale
    plan = plan_decode(case.runs, WORKERS, max_queries=max_queries, min_length=64)
    launch = MLALaunch(16, 16, 4, 2, 1)
    out = mla_decode(case.q, latent, case.runs, plan, scale, latent=32, launch=launch)
    case.v = case.k
    truth = case.plain()[..., :32]
    assert (out.float().cpu() - truth).norm() / truth.norm() < BOUNDS[case.dtype]
