"""The sampler whose rows live on a device against its specification: the same tokens, whatever is asked for.

Without a GPU the kernels run in Triton's interpreter, on small vocabularies."""

import math
import os
import random
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from ops.draws import draws, first_draws, grow_tree  # noqa: E402
from quire.core.watermark import Watermark  # noqa: E402
from quire.ops.gpu.sampling.job import Split  # noqa: E402
from quire.ops.gpu.sampling.philox import random_word  # noqa: E402
from quire.ops.gpu.sampling.race import exponential  # noqa: E402
from quire.ops.gpu.sampling.rows import Features  # noqa: E402
from quire.ops.gpu.sampling.sampler import DeviceSampler  # noqa: E402
from quire.ops.gpu.sampling.softmax_weights import ordered_key, softmax_weight  # noqa: E402
from quire.ops.opset import Masks  # noqa: E402
from quire.ops.philox import random_bits  # noqa: E402
from quire.ops.race import exponentials  # noqa: E402
from quire.ops.reference.filters import distances, weights  # noqa: E402
from quire.ops.reference.sampler import TorchSampler, apply_masks  # noqa: E402
from quire.ops.row_params import DryParams, Filter, MirostatParams, RowParams  # noqa: E402
from quire.ops.sampled_row import BROKEN, CANDIDATES  # noqa: E402
from quire.ops.watermark import is_green  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
VOCAB = 4001 if CUDA else 21
TILE = 256 if CUDA else 16
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the interpreter's: inf is meant
PLAIN = RowParams(seed=7, sample=0)
GREEDY = replace(PLAIN, temperature=0.0)


def bell(lines: int, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn((lines, vocab), generator=torch.Generator().manual_seed(seed)) * scale


class Pair:
    """The device's sampler and the specification, asked the same."""

    def __init__(self, num_rows: int, vocab: int = VOCAB, tile: int = TILE, open_capacity: int = 64) -> None:
        self.device = DeviceSampler(num_rows, vocab, DEVICE, split=Split(tile, warps=4), open_capacity=open_capacity)
        self.spec = TorchSampler(num_rows, vocab)

    def admit(self, row: int, params: RowParams, tokens=(), num_prompt=None) -> None:
        for sampler in (self.device, self.spec):
            sampler.admit(row, params, list(tokens), len(tokens) if num_prompt is None else num_prompt)

    def check_draw(self, logits: torch.Tensor, rows: list[int], masks: Masks | None = None) -> list[int]:
        """Draws with both, which must agree. -> tokens"""
        actual = first_draws(self.device.draw(logits.to(DEVICE), rows, masks))
        expected = first_draws(self.spec.draw(logits.float(), rows, masks))
        for ours, theirs in zip(actual, expected, strict=True):
            assert ours.token == theirs.token
            assert_same_logprobs(ours.logprobs, theirs.logprobs)
        return [draw.token for draw in actual]


def assert_same_logprobs(actual, expected) -> None:
    assert [(token, rank) for token, _, rank in actual] == [(token, rank) for token, _, rank in expected]
    assert [p for _, p, _ in actual] == pytest.approx([p for _, p, _ in expected], rel=1e-12, abs=1e-12)


def draw_one(logits, params: RowParams, tokens=(), num_prompt=None) -> int:
    line = torch.tensor([logits])
    pair = Pair(1, line.shape[1])
    pair.admit(0, params, tokens, num_prompt)
    return pair.check_draw(line, [0])[0]


# -- parts -----------------------------------------------------------------------------------------------------------


@triton.jit
def _draw_numbers(seeds, positions, samples, out, N: tl.constexpr):
    i, ids = tl.program_id(0), tl.arange(0, N)
    word = random_word(tl.load(seeds + i), tl.load(positions + i), tl.load(samples + i))
    tl.store(out + i * N + ids, exponential(word, ids * 97))


def test_random_numbers_are_those_of_the_host_bit_for_bit():
    seeds, positions, samples = [0, -1, 1 << 62, -(1 << 63)], [0, 77, 1 << 33, 5], [0, 3, 127, 1]
    out = torch.zeros((4, 4096), dtype=torch.float64, device=DEVICE)
    given = (torch.tensor(x, device=DEVICE) for x in (seeds, positions, samples))
    _draw_numbers[(4,)](*given, out, N=4096, enable_fp_fusion=False)
    for line, case in zip(out, zip(seeds, positions, samples, strict=True), strict=True):
        expected = exponentials(random_bits(*case)[0], 97 * np.arange(4096))
        assert line.tolist() == expected.tolist()


@triton.jit
def _weigh_all(logits, weight, key, peak, inverse_temperature, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(logits + i)
    tl.store(weight + i, softmax_weight(x, tl.load(peak), tl.load(inverse_temperature)))
    tl.store(key + i, ordered_key(x))


@pytest.mark.parametrize("temperature", [0.013, 0.7, 37.0])
def test_weights_are_those_of_the_specification_bit_for_bit(temperature):
    n = 1 << 12
    logits = torch.cat([bell(1, n - 8)[0] * 4, torch.tensor([0.0, -0.0, 1e-40, -1e-40, -1e30, -3e38, -math.inf, 80.0])])
    weight, key = torch.zeros(n, dtype=torch.int64, device=DEVICE), torch.zeros(n, dtype=torch.int32, device=DEVICE)
    inverse = torch.tensor([1.0 / temperature], dtype=torch.float64, device=DEVICE)
    peak = logits.max().reshape(1).to(DEVICE)
    _weigh_all[(1,)](logits.to(DEVICE), weight, key, peak, inverse, N=n, enable_fp_fusion=False)
    assert torch.equal(weight.cpu(), weights(distances(logits, temperature)))
    assert torch.equal(key.cpu().argsort(stable=True), logits.argsort(stable=True))


# -- each feature ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.02, 1.0])  # nearly uniform: most tokens survive, and counting once is not enough
@pytest.mark.parametrize(
    ("params", "features"),
    [
        ({"temperature": 0.0}, Features.GREEDY),
        ({"top_k": 1, "top_p": 0.5}, Features.GREEDY),
        ({"temperature": 0.7, "top_k": VOCAB}, Features.SAMPLED),
        ({"min_p": 0.2}, Features.SAMPLED),
        ({"top_k": 5}, Features.SAMPLED | Features.FILTERED),
        ({"top_p": 0.8}, Features.SAMPLED | Features.FILTERED),
        (
            {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.3},
            Features.SAMPLED | Features.FILTERED,
        ),
    ],
)
def test_every_path_draws_what_the_specification_draws(params, features, scale):
    pair = Pair(2, open_capacity=8)
    for row in range(2):
        pair.admit(row, RowParams(seed=row, sample=row, **params), [1, 2, 3])
    assert pair.device.needs([0, 1]) == features
    logits = bell(2)
    logits[1] = (logits[1] * 2).round() / 2  # ties
    logits *= scale
    pair.check_draw(logits, [0, 1])


@pytest.mark.parametrize(
    ("params", "greatest"),
    [({"top_k": 6}, 1.0), ({"top_p": 0.7}, 1.0), ({"top_p": 0.7}, math.inf), ({"top_k": 9, "top_p": 0.6}, 1.0)],
)
def test_a_cut_among_more_equals_than_can_be_listed(params, greatest):
    """All logits equal but a few: the ids decide."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 3:7] = greatest
    pair = Pair(1, tile=4096 if CUDA else 32, open_capacity=2)
    pair.admit(0, replace(PLAIN, **params))
    pair.check_draw(logits, [0])


def random_params(choose: random.Random) -> RowParams:
    token = lambda: choose.randrange(VOCAB)  # noqa: E731
    return RowParams(
        seed=choose.randrange(-(2**63), 2**64),
        sample=choose.randrange(128),
        temperature=choose.choice([0.0, 0.01, 0.5, 1.0, 1.0, 2.0, 100.0]),
        top_k=choose.choice([0, 0, 1, 3, 10, 1000]),
        top_p=choose.choice([1.0, 1.0, 0.999, 0.9, 0.5, 1e-9]),
        min_p=choose.choice([0.0, 0.0, 0.01, 0.3, 1.0]),
        repetition_penalty=choose.choice([1.0, 1.3, 0.7]),
        presence_penalty=choose.choice([0.0, 0.6, -2.0]),
        frequency_penalty=choose.choice([0.0, 0.3, -0.5]),
        logit_bias=tuple({token(): choose.uniform(-9, 9) for _ in range(choose.choice([0, 0, 3]))}.items()),
        allowed=choose.choice([None, None, tuple({token() for _ in range(6)})]),
        banned=tuple((token(),) for _ in range(choose.choice([0, 0, 4]))),
        stop_ids=(token(), VOCAB + 3),
        min_tokens=choose.choice([0, 0, 4]),
        num_logprobs=choose.choice([-1, 0, 3]),
        logprob_ids=tuple(choose.sample(range(VOCAB), choose.choice([0, 0, 2]))),
        watermark=choose.choice([None, Watermark(), Watermark(gamma=0.9, delta=30.0, key=2**64 - 1)]),
    )


@pytest.mark.parametrize("seed", range(20 if CUDA else 1))
def test_random_parameters_and_awkward_logits(seed):
    choose = random.Random(seed)
    rows = 32 if CUDA else 5
    pair = Pair(rows, open_capacity=16)
    for row in range(rows):
        pair.admit(row, random_params(choose), [choose.randrange(VOCAB) for _ in range(5)], choose.randrange(6))
    for step in range(8 if CUDA else 2):  # tokens drawn earlier weigh in later
        logits = bell(rows, seed=step)
        logits[::2] = logits[::2].round()
        for value in (math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, -0.0):
            logits[choose.randrange(rows), choose.randrange(VOCAB)] = value
        pair.check_draw(logits[1:], choose.sample(range(rows), rows - 1))


# -- what changes logits ---------------------------------------------------------------------------------------------


def test_edits_over_several_steps():
    """Bias, masks, min_tokens and penalties, of which the last three depend on what was drawn."""
    pair = Pair(2)
    pair.admit(0, replace(GREEDY, logit_bias=((3, 90.0),), banned=((5,),), stop_ids=(3, VOCAB), min_tokens=2), [1], 1)
    pair.admit(1, replace(GREEDY, allowed=(2, 3, 4), frequency_penalty=1.5, repetition_penalty=1.2), [2, 4, 4], 1)
    assert (pair.device.needs([0]), pair.device.needs([1])) == (Features.BIASED | Features.MARKED,) * 2
    for step in range(3):
        tokens = pair.check_draw(bell(2, seed=step), [0, 1])
        assert (tokens[0] == 3) == (step >= 2)


def test_a_watermark_goes_by_the_token_before():
    """Of the prompt at first, then of what was drawn; beside a row that has none."""
    pair = Pair(2)
    pair.admit(0, replace(GREEDY, watermark=Watermark(delta=50.0)), [4, 7])
    pair.admit(1, GREEDY, [4, 7])
    assert pair.device.needs([0, 1]) == Features.WATERMARKED
    before = 7
    for step in range(3):
        logits = bell(2, seed=step)
        logits[1] = logits[0]
        marked, plain = pair.check_draw(logits, [0, 1])
        assert is_green(Watermark(), before, marked) and plain == int(logits[0].argmax())
        before = marked


def test_when_all_is_masked_the_best_allowed_is_taken():
    params = replace(PLAIN, allowed=(0, 1), banned=((0,), (1,)), logit_bias=((0, 50.0),))
    assert draw_one([1.0, 2.0, 3.0], params) == 1
    assert draw_one([1.0, 2.0, 3.0], replace(params, top_p=0.5)) == 1


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 5}])
def test_masks_of_a_step(params):
    """Half of the tokens, one token, or none; and a line without a mask."""
    pair = Pair(4)
    for row in range(4):
        pair.admit(row, replace(PLAIN, seed=row, **params, num_logprobs=1, presence_penalty=0.5), [1, 2], 1)
    bits = np.zeros((3, -(-VOCAB // 32) * 32), np.uint8)
    bits[0, ::2] = bits[1, 5] = 1
    masks = Masks([0, 2, 3], np.packbits(bits, axis=1, bitorder="little").view(np.uint32))
    tokens = pair.check_draw(bell(4), [3, 0, 1, 2], masks)
    assert tokens[0] % 2 == 0 and tokens[2] == 5 and tokens[3] == BROKEN


def test_logits_that_are_not_numbers():
    nan, inf = math.nan, math.inf
    assert draw_one([nan, 1.0, nan], PLAIN) == 1
    assert draw_one([1.0, inf, 3.0], replace(PLAIN, top_p=0.9)) == 1
    assert draw_one([nan, -inf, nan], GREEDY) == BROKEN
    assert draw_one([nan, -inf, nan], replace(PLAIN, top_k=2)) == BROKEN
    assert draw_one([nan, 1.0, nan], replace(PLAIN, allowed=(0,))) == BROKEN


# -- outside of the kernels ------------------------------------------------------------------------------------------


def test_rows_of_the_slow_path_stand_beside_others():
    pair = Pair(4)
    pair.admit(0, replace(PLAIN, typical_p=0.7, num_logprobs=1), [1])
    pair.admit(1, replace(GREEDY, num_logprobs=2, logprob_ids=(5, 3)), [1])
    pair.admit(2, replace(GREEDY, banned=((1, 2, 0),)), [1, 2])
    pair.admit(3, replace(PLAIN, num_candidates=4), [1])
    assert pair.device.needs([0, 1]) == Features.ON_HOST
    logits = bell(4)
    logits[2, 0] = 99.0  # forbidden after 1, 2, and only there
    tokens = [pair.check_draw(logits, [0, 1, 2, 3]) for _ in range(2)]
    assert (tokens[0][2] == 0, tokens[1][2] == 0, tokens[0][3]) == (False, True, CANDIDATES)


def test_prompt_logprobs():
    logits = bell(20)
    logits[0, :3] = math.nan
    logits[1, 4:9] = 7.0
    logits[2] = -math.inf
    targets = [line % VOCAB for line in range(20)]
    actual = DeviceSampler(1, VOCAB, DEVICE).logprobs(logits.to(DEVICE), targets, 4)
    for ours, theirs in zip(actual, TorchSampler(1, VOCAB).logprobs(logits, targets, 4), strict=True):
        assert_same_logprobs(ours, theirs)


def test_bf16_logits_are_taken_for_what_they_are():
    pair = Pair(2)
    pair.admit(0, GREEDY)
    pair.admit(1, replace(PLAIN, top_p=0.9, num_logprobs=1))
    pair.check_draw(bell(2).bfloat16(), [1, 0])


# -- rows ------------------------------------------------------------------------------------------------------------


def test_launch_passes_over_padding_and_keeps_each_rows_state():
    pair = Pair(3)
    for row in range(3):
        pair.admit(row, replace(PLAIN, seed=row))
    pair.device.upload()
    first = bell(2)
    rows = torch.tensor([2, -1, 0], dtype=torch.int32, device=DEVICE)
    lines = torch.cat([first, bell(1, seed=5)]).to(DEVICE)
    tokens = pair.device.launch(lines, rows, 3, Features.SAMPLED).tolist()
    expected = first_draws(pair.spec.draw(lines.cpu()[[0, 2]], [2, 0]))
    assert tokens == [expected[0].token, 0, expected[1].token]
    pair.check_draw(bell(3, seed=6), [0, 1, 2])  # positions 1, 0 and 1


def test_a_row_that_is_taken_again_remembers_nothing():
    pair = Pair(1)
    pair.admit(0, replace(GREEDY, allowed=(1, 2), frequency_penalty=5.0), [1, 1, 2], 0)
    pair.check_draw(bell(1), [0])
    for sampler in (pair.device, pair.spec):
        sampler.retire(0)
    pair.admit(0, replace(GREEDY, logit_bias=((4, 1.0),), presence_penalty=1.0), [7], 0)
    pair.check_draw(bell(1), [0])


def test_neighbours_and_tiles_change_nothing():
    request, logits = replace(PLAIN, seed=11, temperature=1.5, top_p=0.95), bell(1)
    alone = Pair(1, tile=4 * TILE)
    alone.admit(0, request, [1])
    crowd = Pair(3)
    for row in range(2):
        crowd.admit(row, replace(PLAIN, seed=row, min_p=0.1 * row))
    crowd.admit(2, request, [1])
    assert crowd.check_draw(logits.repeat(3, 1), [0, 2, 1])[1] == alone.check_draw(logits, [0])[0]


@pytest.mark.skipif(not CUDA, reason="needs a GPU: graphs are CUDA's")
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 50, "top_p": 0.9}, {"frequency_penalty": 0.4}])
def test_a_captured_graph_draws_on(params):
    vocab, rows = 50_000, 4
    pair = Pair(rows, vocab, tile=1024, open_capacity=2048)
    for row in range(rows):
        pair.admit(row, replace(PLAIN, seed=row, **params), [1, 2])
    logits, lines = bell(rows, vocab).cuda(), torch.arange(rows, dtype=torch.int32, device="cuda")
    features = pair.device.needs(range(rows))
    pair.check_draw(logits.cpu(), list(range(rows)))  # compiles, and allocates what the features need
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = pair.device.launch(logits, lines, rows, features)
    for step in range(3):
        logits.copy_(bell(rows, vocab, seed=step))
        graph.replay()
        assert tokens.tolist() == [draw.token for draw in first_draws(pair.spec.draw(logits.cpu(), list(range(rows))))]


# -- drafts ----------------------------------------------------------------------------------------------------------

WISHES = {
    "greedy": {"temperature": 0.0},
    "drawn": {"num_logprobs": 2},
    "filtered": {"temperature": 1.2, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    "penalized": {"repetition_penalty": 1.4, "frequency_penalty": 0.9, "presence_penalty": 0.3},
    "not too short": {"min_tokens": 3, "stop_ids": (0, 1, 2)},
    "marked": {"watermark": Watermark(key=5, delta=3.0)},
    "typical": {"typical_p": 0.7, "num_logprobs": 1},
    "dry": {"dry": DryParams(0.8, 1.75, 1), "no_repeat_ngram": 3},
    "xtc": {"xtc_probability": 0.5, "top_n_sigma": 1.5, "dynatemp_range": 0.5},
    "mirostat 1": {"mirostat": MirostatParams(1, tau=2.0, eta=0.5), "num_logprobs": 0},
    "mirostat 2": {"mirostat": MirostatParams(2, tau=2.0, eta=0.5)},
    "llama.cpp's order": {
        "temperature": 1.5,
        "top_k": 9,
        "min_p": 0.1,
        "order": (Filter.TOP_K, Filter.MIN_P, Filter.TEMPERATURE),
    },
    "greedy with dry": {"temperature": 0.0, "dry": DryParams(5.0, 1.75, 1)},
}


@pytest.mark.parametrize("wishes", WISHES)
def test_drafts_are_verified_as_the_specification_does(wishes):
    """Beside a row that draws one token, in two steps, with drafts that are right to different lengths."""
    pair = Pair(3)
    for row in range(3):
        pair.admit(row, replace(PLAIN, seed=row, **(WISHES[wishes] if row else {})), [1, 2, 3])
    for step in range(2):
        logits = bell(8, seed=step)
        masks = Masks([0, 3], np.full((2, -(-VOCAB // 32)), 0xFFFFFFF0, np.uint32))
        truth = TorchSampler(3, VOCAB)
        for row in range(3):
            of_row = pair.spec._rows[row]
            truth.admit(row, of_row.params, of_row.tokens, 3, of_row.mu)
        permitted = apply_masks(logits, masks)
        right = {row: [truth.draw(permitted[at : at + 1], [row])[0].tokens[0] for at in lines]
                 for row, lines in {1: range(1, 4), 2: range(4, 8)}.items()}  # fmt: skip
        drafts = [[], right[1][:2], [right[2][0], (right[2][1] + 1) % VOCAB, 0]]
        actual = [draws(one) for one in pair.device.verify(logits.to(DEVICE), [0, 1, 2], drafts, masks)()]
        expected = [draws(one) for one in pair.spec.verify(logits, [0, 1, 2], drafts, masks)()]
        assert [len(of_row) for of_row in actual] == [1, 3, 2]
        for ours, theirs in zip(chain(*actual), chain(*expected), strict=True):
            assert ours.token == theirs.token
            assert_same_logprobs(ours.logprobs, theirs.logprobs)
    pair.check_draw(bell(3, seed=9), [0, 1, 2])


def draw_line(sampler: TorchSampler, row: int, logits: torch.Tensor, line: int) -> int:
    return sampler.draw(logits[line : line + 1], [row])[0].tokens[0]


@pytest.mark.parametrize("wishes", WISHES)
def test_trees_are_walked_as_the_specification_does(wishes):
    """Beside a row that draws one token, with a mask for every line."""
    pair, chance, num_accepted = Pair(3), random.Random(4), 0
    for row in range(3):
        pair.admit(row, replace(PLAIN, seed=row, **(WISHES[wishes] if row else {})), [1, 2, 3])
    num_nodes = 13 if CUDA else 8
    num_lines = 2 + 2 * (1 + num_nodes)
    for step in range(3 if CUDA else 2):
        whole = bell(num_lines, seed=step)
        bits = np.array([[chance.getrandbits(32) | 0xF0F0 for _ in range(-(-VOCAB // 32))] for _ in whole], np.uint32)
        permitted = apply_masks(whole, Masks(range(num_lines), bits))
        truth = TorchSampler(3, VOCAB)
        kept, trees = [0], [([], [])]
        for row in (1, 2):
            of_row, first = pair.spec._rows[row], 1 + (1 + num_nodes) * (row - 1)
            truth.admit(row, of_row.params, of_row.tokens, 3, of_row.mu)
            lines = permitted[first : first + 1 + num_nodes]
            draw = partial(draw_line, truth, row, lines)
            tree = grow_tree(chance, VOCAB, num_nodes, draw)
            kept += range(first, first + 1 + len(tree.tokens))
            trees.append((tree.tokens, tree.parents))
        drafts, parents = ([tree[part] for tree in trees] for part in (0, 1))
        logits, masks = whole[kept], Masks(range(len(kept)), bits[kept])
        actual = [draws(one) for one in pair.device.verify(logits.to(DEVICE), [0, 1, 2], drafts, masks, parents)()]
        expected = [draws(one) for one in pair.spec.verify(logits, [0, 1, 2], drafts, masks, parents)()]
        assert [len(of_row) for of_row in actual] == [len(of_row) for of_row in expected]
        num_accepted += sum(map(len, expected)) - 3
        for ours, theirs in zip(chain(*actual), chain(*expected), strict=True):
            assert ours.token == theirs.token
            assert_same_logprobs(ours.logprobs, theirs.logprobs)
    assert num_accepted > 2
    pair.check_draw(bell(3, seed=9), [0, 1, 2])


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 5, "top_p": 0.9}])
def test_steps_that_are_repeated_draw_on(params):
    """Where logits are at the same place in every step, a GPU captures what is launched: the numbers of rows, their
    drafts and which of them are right still change."""
    pair, rows = Pair(5), [0, 1, 2, 3]
    for row in range(5):
        pair.admit(row, replace(PLAIN, seed=row, **(params if row < 4 else {})), [1, 2])
    place = torch.empty(12, VOCAB, device=DEVICE)
    for step in range(8 if CUDA else 3):
        logits = bell(12, seed=step)
        place.copy_(logits)
        truth = TorchSampler(5, VOCAB)
        for row in rows:
            of_row = pair.spec._rows[row]
            truth.admit(row, of_row.params, of_row.tokens, 2)
        right = [[draw_line(truth, row, logits, 3 * row + depth) for depth in range(2)] for row in rows]
        drafts = [[token if (row + step) % 3 else 0 for token in right[row]] for row in rows]
        actual = [one.tokens for one in pair.device.verify(place, rows, drafts)()]
        assert actual == [one.tokens for one in pair.spec.verify(logits, rows, drafts)()]
        several = rows[: 2 + step % 2]
        place.copy_(logits.flip(0))
        actual = [one.tokens for one in pair.device.draw(place[: len(several)], several)]
        assert actual == [one.tokens for one in pair.spec.draw(logits.flip(0)[: len(several)], several)]
    assert len(pair.device._graphs._graphs) >= 2 * CUDA


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [{"allowed": (4,)}, {"logit_bias": ((-1, 1.0),)}, {"banned": ((0, 9),)}])
def test_ids_outside_the_vocabulary_are_refused(wrong):
    with pytest.raises(ValueError, match="the vocabulary has 4"):
        DeviceSampler(1, 4, DEVICE).admit(0, replace(PLAIN, **wrong), [], 0)


def test_misuse_is_refused():
    sampler = DeviceSampler(2, 4, DEVICE)
    sampler.admit(0, PLAIN, [], 0)
    with pytest.raises(ValueError, match="row 0 is held"):
        sampler.admit(0, PLAIN, [], 0)
    with pytest.raises(ValueError, match="row 1 is not admitted"):
        sampler.draw(torch.zeros(1, 4, device=DEVICE), [1])
    with pytest.raises(ValueError, match="twice"):
        sampler.draw(torch.zeros(2, 4, device=DEVICE), [0, 0])
    with pytest.raises(ValueError, match=r"\[1, 4\]"):
        sampler.draw(torch.zeros(1, 5, device=DEVICE), [0])
    with pytest.raises(ValueError, match="524287"):
        DeviceSampler(1, 1 << 19, DEVICE)


def test_what_is_tried_out_at_the_start_changes_no_token():
    pair = Pair(3)
    pair.admit(1, replace(PLAIN, top_p=0.7), [5, 6])
    pair.device.upload()
    before = pair.device.last.tolist()
    pair.device.warm_up(torch.float32)
    assert pair.device.last.tolist() == before
    pair.check_draw(bell(1), [1])


def test_a_row_that_comes_back_with_other_tokens_is_where_a_new_one_would_be() -> None:
    """Its parameters are not sent again; another's are, in between."""
    params, other = replace(PLAIN, seed=5, temperature=0.9), replace(PLAIN, seed=6)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    back, fresh = (DeviceSampler(2, VOCAB, DEVICE) for _ in range(2))
    for owner, tokens in ((params, [1, 2, 3]), (params, [1, 2, 3, 4, 5]), (other, [1]), (params, [7, 8])):
        back.admit(0, owner, np.array(tokens, np.int32), 1)
        fresh.admit(0, replace(owner), tokens, 1)
        for _ in range(2):
            drawn, expected = (draws(one.draw(logits.to(DEVICE), [0])[0]) for one in (back, fresh))
            assert drawn == expected
        back.retire(0)
        fresh.retire(0)
