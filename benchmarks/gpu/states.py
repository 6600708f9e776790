"""The recurrences of hybrids on a GPU: prompts in tiles and token by token, and decoding, beside what a GPU can do.

    python -m benchmarks.gpu.states [--only gated] [--sweep]

Shapes are those of Qwen3-Next 80B-A3B, Kimi Linear 48B, MiniMax-01 and Granite 4 H Small. A prompt's share is of the
nearer ceiling: bytes are those of q, k, v, gates and outputs, once; operations those of tiles of 64 tokens. A decoding
step reads and writes each state once. Where `fla` (flash-linear-attention) is importable, its chunked kernels take the
same inputs."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.measuring import Ceilings, relative_error, seconds_a_call
from quire.ops.gpu.states import tiles
from quire.ops.gpu.states.linear_attention import Decays, Gates, attend_tokens
from quire.ops.gpu.states.segments import TILE, DeviceSegments, segments_on_device
from quire.ops.gpu.states.tiles import attend_tiles
from quire.ops.opset import StepBatch

SHAPES = {  # key heads, heads, key_dim, value_dim
    "gated": (16, 32, 128, 128),
    "kimi": (32, 32, 128, 128),
    "lightning": (64, 64, 128, 128),
    "mamba2": (1, 128, 128, 64),
}
CUDA = torch.device("cuda")


class Case:
    """Random tokens of a recurrence."""

    def __init__(self, kind: str, num_tokens: int, num_slots: int) -> None:
        torch.manual_seed(0)
        self.kind, self.num_tokens = kind, num_tokens
        self.shape = key_heads, heads, key_dim, value_dim = SHAPES[kind]

        def randn(*shape: int) -> Tensor:
            return torch.randn(num_tokens, *shape, device=CUDA)

        self.q = F.normalize(randn(key_heads, key_dim), dim=-1).flatten(1).bfloat16() / key_dim**0.5
        self.k = F.normalize(randn(key_heads, key_dim), dim=-1).flatten(1).bfloat16()
        self.v = randn(heads * value_dim).bfloat16()
        self.slots = torch.zeros(num_slots, heads, key_dim, value_dim, device=CUDA)
        rates = torch.rand(heads, device=CUDA) + 0.01
        if kind == "lightning":
            self.gates = Gates(Decays.HEAD, torch.exp(-rates / 8))
        elif kind == "mamba2":
            self.gates = Gates(Decays.MAMBA2, randn(heads).bfloat16(), None, rates, -rates, rates)
        else:
            beta = randn(heads).sigmoid().bfloat16()
            decays = heads * (key_dim if kind == "kimi" else 1)
            self.gates = Gates(Decays.ROW if kind == "kimi" else Decays.TOKEN, -0.1 * F.softplus(randn(decays)), beta)

    def call(self, attend: Any, segments: DeviceSegments) -> Callable[[], Tensor]:
        return lambda: attend(self.q, self.k, self.v, self.gates, self.slots, segments)

    @property
    def nbytes(self) -> int:
        """Of all inputs and outputs of a prompt."""
        inputs = [self.q, self.k, self.v, self.v, self.gates.beta]
        inputs += [self.gates.decay] if self.kind != "lightning" else []
        return sum(x.nbytes for x in inputs if x is not None)

    @property
    def operations(self) -> int:
        """Scores, their sum, the outputs of a state and what is added to it; in the delta rule also the products of
        keys, the inverse applied twice, and what a state has for a key."""
        _, heads, rows, columns = self.shape
        token = TILE * (rows + columns) + 2 * rows * columns
        if self.gates.beta is not None:
            token += TILE * (2 * rows + columns) + rows * columns
        return 2 * token * heads * self.num_tokens


def segments_of(states: list[tuple[int, int, int]]) -> DeviceSegments:
    ids, nothing = np.zeros(states[-1][0], np.int32), np.zeros(0, np.int32)
    batch = StepBatch(ids, ids, ids, nothing, nothing, nothing, nothing, states=np.array(states, np.int32))
    return segments_on_device(batch, 1, CUDA)


def prompt(kind: str, ceilings: Ceilings, num_tokens: int = 8192) -> None:
    case, whole = Case(kind, num_tokens, 32), segments_of([(num_tokens, -1, 0)])
    cuts = [(end, 16 * (end - 512) // 8192 if end > 512 else -1, 16 * end // 8192) for end in range(512, 8193, 512)]
    rows = {
        "in tiles": (attend_tiles, whole),
        "in tiles, a checkpoint every 512": (attend_tiles, segments_of(cuts)),
        "token by token": (attend_tokens, whole),
    }
    found = {}
    for name, (attend, segments) in rows.items():
        call = case.call(attend, segments)
        found[name] = call().float(), case.slots[segments.table[-1, 3]].clone()
        seconds = seconds_a_call([call] * 2, rounds=3)
        print(ceilings.line(f"{kind}, {num_tokens} tokens {name}", seconds, case.nbytes, case.operations), flush=True)
    exact = found["token by token"]
    for name, values in list(found.items())[:2]:
        errors = [relative_error(value, truth) for value, truth in zip(values, exact, strict=True)]
        print(f"    {name}: outputs differ by {errors[0]:.1e}, states by {errors[1]:.1e}")
    peer(case, ceilings, exact)


def peer(case: Case, ceilings: Ceilings, exact: tuple[Tensor, Tensor]) -> None:
    if find_spec("fla") is None or case.gates.beta is None:
        return
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    _, heads, key_dim, value_dim = case.shape
    q, k = (x.unflatten(1, (-1, key_dim))[None] for x in (case.q, case.k))
    q, k = (x.repeat_interleave(heads // x.shape[2], 2).contiguous() for x in (q, k))
    v, decay = case.v.unflatten(1, (-1, value_dim))[None], case.gates.decay[None]
    attend = chunk_gated_delta_rule
    if case.kind == "kimi":
        attend, decay = chunk_kda, decay.unflatten(2, (-1, key_dim))
    options = {"scale": 1.0, "output_final_state": True}
    with torch.inference_mode():
        out, state = attend(q, k, v, decay, case.gates.beta[None], **options)
        seconds = seconds_a_call([lambda: attend(q, k, v, decay, case.gates.beta[None], **options)] * 2, rounds=3)
    print(ceilings.line(f"{case.kind}, {case.num_tokens} tokens, fla", seconds, case.nbytes, case.operations))
    errors = relative_error(out[0].flatten(1), exact[0]), relative_error(state[0], exact[1])
    print(f"    fla: outputs differ by {errors[0]:.1e}, states by {errors[1]:.1e}", flush=True)


def decode(kind: str, ceilings: Ceilings, num_seqs: int) -> None:
    case = Case(kind, num_seqs, 2 * num_seqs)
    states = [[(i + 1, first + i, first + i) for i in range(num_seqs)] for first in (0, num_seqs)]
    calls = [case.call(attend_tokens, segments_of(state)) for state in states]
    nbytes = case.slots.nbytes + case.nbytes
    print(ceilings.line(f"{kind}, decode of {num_seqs}", seconds_a_call(calls), nbytes, 0), flush=True)


def sweep(kind: str) -> None:
    """Of launches, by what they change in tiles.py."""
    case, segments = Case(kind, 8192, 2), segments_of([(8192, -1, 0)])
    for columns, warps, stages in product((16, 32, 64), (4,), (1, 2, 3)):
        tiles.LAUNCH = replace(tiles.LAUNCH, columns=columns, warps=warps, stages=stages)
        try:
            seconds = seconds_a_call([case.call(attend_tiles, segments)] * 2, rounds=3)
        except Exception as error:
            print(f"    failed: {tiles.LAUNCH}: {str(error).splitlines()[0][:80]}")
            continue
        print(f"{kind} {seconds * 1e6:8.1f} us  {tiles.LAUNCH}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SHAPES)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    kinds = [args.only] if args.only else list(SHAPES)
    if args.sweep:
        for kind in kinds:
            sweep(kind)
        return
    ceilings = Ceilings()
    for kind in kinds:
        prompt(kind, ceilings)
    for kind, num_seqs in product(kinds, (1, 64, 256)):
        decode(kind, ceilings, num_seqs)


if __name__ == "__main__":
    main()
