"""Norms, activations and gathers on a GPU: correct, and how close to the speed of a copy.

    python -m benchmarks.gpu.elementwise

One line a case: few rows show the time of a launch, many the bandwidth."""

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from benchmarks.gpu.measuring import Ceilings, check, seconds_a_call
from quire.ops.gpu.activation import activate_and_mul, activate_and_mul_quantized
from quire.ops.gpu.embedding import embedding
from quire.ops.gpu.linear.quantize_rows import QuantizedRows, quantize_rows
from quire.ops.gpu.norm import add_rms_norm, add_rms_norm_quantized, layer_norm, rms_norm, rms_norm_quantized
from quire.ops.opset import Activation

FP8 = torch.float8_e4m3fn
EPS = 1e-5
HIDDEN, INTERMEDIATE, VOCABULARY = 4096, 14336, 128256


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[1],), weight.float(), EPS)


def back(q: QuantizedRows) -> Tensor:
    """As numbers."""
    return (q.q.float().unflatten(1, (q.scales.shape[1], -1)) * q.scales[..., None]).flatten(1)


def check_all() -> None:
    for rows, n in ((1, 4096), (3, 5120), (17, 200), (64, 14336)):
        x, residual, weight, gated = randn(rows, n), randn(rows, n), randn(n), randn(rows, 2 * n)
        name = f"{rows}x{n}"
        check(f"rms_norm {name}", rms_norm(x, weight, EPS), plain_norm(x, weight), 3e-3)
        normed, total = add_rms_norm(x, residual, weight, EPS)
        if not torch.equal(total, x + residual) or not torch.equal(normed, rms_norm(total, weight, EPS)):
            print(f"WRONG add_rms_norm {name}: not an addition and a norm")
        plain = F.layer_norm(x.float(), (n,), weight.float(), None, EPS)
        check(f"layer_norm {name}", layer_norm(x, weight, None, EPS), plain, 3e-3)
        gate, up = gated.float().chunk(2, dim=1)
        for activation, f in (
            (Activation.SILU, F.silu),
            (Activation.GELU, F.gelu),
            (Activation.GELU_TANH, partial(F.gelu, approximate="tanh")),
        ):
            check(f"{activation.name} {name}", activate_and_mul(gated, activation), f(gate) * up, 3e-3)
        for dtype, bound in ((torch.int8, 2e-2), (FP8, 4e-2)):  # more where a few columns are far above the others
            for group in (0, 128) if n % 128 == 0 else (0,):
                tag = f"{name} {dtype} group={group}"
                check(f"quantize_rows {tag}", back(quantize_rows(x, dtype, group)), x, bound)
                norm = rms_norm_quantized(x, weight, EPS, dtype, group)
                check(f"rms_norm_quantized {tag}", back(norm), plain_norm(x, weight), 3 * bound)
                active = activate_and_mul_quantized(gated, Activation.SILU, dtype, group)
                check(f"silu quantized {tag}", back(active), F.silu(gate) * up, 5 * bound)
    table, ids = randn(1000, 4096), torch.randint(0, 1000, (77,), device="cuda", dtype=torch.int32)
    if not torch.equal(embedding(ids, table), table[ids.long()]):
        print("WRONG embedding")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="nothing is chosen here: the same as without")
    parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    ceilings = Ceilings()
    check_all()
    print("elementwise: checked", flush=True)
    weight, table = randn(HIDDEN), randn(VOCABULARY, HIDDEN)
    for rows in (1, 64, 8192):
        x, residual, gated = randn(rows, HIDDEN), randn(rows, HIDDEN), randn(rows, 2 * INTERMEDIATE)
        ids = torch.randint(0, VOCABULARY, (rows,), device="cuda", dtype=torch.int32)
        size, wide = x.nbytes, gated.nbytes
        cases: dict[str, tuple[Callable[[], object], int]] = {
            "rms_norm": (lambda x=x: rms_norm(x, weight, EPS), 2 * size),
            "add_rms_norm": (lambda x=x, r=residual: add_rms_norm(x, r, weight, EPS), 4 * size),
            "add_rms_norm fp8": (
                lambda x=x, r=residual: add_rms_norm_quantized(x, r, weight, EPS, FP8),
                3 * size + size // 2,
            ),
            "quantize_rows fp8 g128": (lambda x=x: quantize_rows(x, FP8, 128), size + size // 2),
            "silu_and_mul": (lambda g=gated: activate_and_mul(g, Activation.SILU), wide + wide // 2),
            "silu_and_mul fp8": (
                lambda g=gated: activate_and_mul_quantized(g, Activation.SILU, FP8),
                wide + wide // 4,
            ),
            "gelu_and_mul": (lambda g=gated: activate_and_mul(g, Activation.GELU), wide + wide // 2),
            "embedding": (lambda ids=ids: embedding(ids, table), 2 * size),
        }
        for name, (call, nbytes) in cases.items():
            print(ceilings.line(f"{name} {rows} rows", seconds_a_call([call] * 20), nbytes, 0))


if __name__ == "__main__":
    main()
