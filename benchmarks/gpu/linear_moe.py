"""Mixtures of experts."""

from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.measuring import Ceilings, check, rows, seconds_a_call
from quire.ops.gpu.moe import moe
from quire.ops.gpu.moe.moe import moe_mlp

MOE_SHAPES = {"Mixtral-8x7B": (8, 2, 4096, 14336), "Qwen3-30B-A3B": (128, 8, 2048, 768)}  # E, k, H, I


def random_routes(T: int, k: int, E: int) -> tuple[Tensor, Tensor]:
    weights, ids = torch.randn(T, E, device="cuda").softmax(-1).topk(k)
    return ids.int(), weights


def plain_moe(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """In fp32, expert by expert."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(len(gate_up)):
        weight = torch.where(ids == expert, weights, 0.0).sum(1)
        gate, up = (x.float() @ gate_up[expert].float().T).chunk(2, dim=1)
        out += weight[:, None] * ((F.silu(gate) * up) @ down[expert].float().T)
    return out


def check_moe() -> None:
    for E, k, H, intermediate in ((8, 2, 520, 264), (60, 4, 512, 128)):
        gate_up = torch.randn(E, 2 * intermediate, H, device="cuda").bfloat16() / 16
        down = torch.randn(E, H, intermediate, device="cuda").bfloat16() / 16
        for T in (1, 3, 17, 200, 3000):
            x, (ids, weights) = rows(T, H), random_routes(T, k, E)
            y = moe_mlp(x, ids, weights, gate_up, down)
            check(f"moe E={E} T={T}", y, plain_moe(x, ids, weights, gate_up, down), 1e-2)
            invariant = partial(moe_mlp, gate_up=gate_up, down=down, batch_invariant=True)
            if not torch.equal(invariant(x[:1], ids[:1], weights[:1]), invariant(x, ids, weights)[:1]):
                print(f"WRONG moe E={E}: one token differs from the same among {T}")


def run_moe(ceilings: Ceilings) -> None:
    for name, (E, k, H, intermediate) in MOE_SHAPES.items():
        layers = 2 if E == 8 else 6
        gate_ups = [torch.randn(E, 2 * intermediate, H, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]
        downs = [torch.randn(E, H, intermediate, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]
        for T in (1, 4, 16, 64, 256, 2048, 8192):
            x, (ids, weights) = rows(T, H), random_routes(T, k, E)
            calls = [partial(moe_mlp, x, ids, weights, g, d) for g, d in zip(gate_ups, downs, strict=True)]
            expert_weights = 3 * H * intermediate
            nbytes = 2 * expert_weights * len(ids.unique())
            line = ceilings.line(f"{name} T={T}", seconds_a_call(calls), nbytes, 2 * T * k * expert_weights)
            print(line, flush=True)


def sweep_moe() -> None:
    for (name, (E, k, H, intermediate)), T in product(MOE_SHAPES.items(), (16, 128)):
        gate_up = torch.randn(E, 2 * intermediate, H, device="cuda", dtype=torch.bfloat16)
        down = torch.randn(E, H, intermediate, device="cuda", dtype=torch.bfloat16)
        x, (ids, weights) = rows(T, H), random_routes(T, k, E)
        block, timings = moe.tile_block(T * k * 4 // 3, E), []
        kept = moe.CONFIGS[block]
        for config in product((64, 128), (64, 128), (4, 8), (3, 4, 5)):
            moe.CONFIGS[block] = config
            try:
                timings.append((seconds_a_call([partial(moe_mlp, x, ids, weights, gate_up, down)] * 3, 3), config))
            except Exception as error:
                print(f"    failed: {config}: {str(error).splitlines()[0][:100]}")
        moe.CONFIGS[block] = kept
        for seconds, config in sorted(timings)[:2]:
            print(f"best {name} T={T} block={block}: {seconds * 1e6:.1f} us {config}", flush=True)
