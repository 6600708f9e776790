"""Instructions of a GPU, carried out in Python: what unpacks quantized values is tested without one."""

from collections.abc import Sequence

import torch
from torch import Tensor


def execute(asm: str, words: tuple[int, ...], num_planes: int, dtype: torch.dtype) -> list[Tensor]:
    """What the instructions make of two words, and of a third with two halves: planes of two floats each."""
    return [_floats(plane, dtype) for plane in run(asm, [torch.tensor(word) for word in words], num_planes)]


def run(asm: str, words: Sequence[Tensor], num_results: int) -> list[Tensor]:
    """Words are tensors of int64, of 32 bits each; so are the results."""
    registers = {f"${num_results + i}": word for i, word in enumerate(words)}
    for line in asm.strip("{} \n").split(";"):
        op, _, operands = line.strip().partition(" ")
        if not op:
            continue
        if op == ".reg":
            registers |= dict.fromkeys(operands.removeprefix(".b32 ").split(", "), torch.tensor(0))
            continue
        target, *sources = operands.split(", ")
        registers[target] = _result(op, [registers[o] if o in registers else torch.tensor(int(o, 0)) for o in sources])
    return [registers[f"${i}"] for i in range(num_results)]


def _result(op: str, sources: list[Tensor]) -> Tensor:
    a, *rest = sources
    dtype = torch.bfloat16 if op.endswith("bf16x2") else torch.float16
    match op.split(".")[0]:
        case "mov":
            return a
        case "and":
            return a & rest[0]
        case "or":
            return a | rest[0]
        case "xor":
            return a ^ rest[0]
        case "shr":
            return a >> rest[0]
        case "shl":
            return a << rest[0] & 0xFFFFFFFF
        case "add":
            return a + rest[0] & 0xFFFFFFFF
        case "lop3":
            return _of_three(a, rest[0], rest[1], table=int(rest[2]))
        case "prmt":
            both = [a >> 8 * i & 255 for i in range(4)] + [rest[0] >> 8 * i & 255 for i in range(4)]
            picks = [int(rest[1]) >> 4 * i & 15 for i in range(4)]
            assert max(picks) < 8  # the top bit would spread a sign
            return sum((both[pick] << 8 * i for i, pick in enumerate(picks)), torch.tensor(0))
        case "mul" if op == "mul.lo.u32":
            return a * rest[0] & 0xFFFFFFFF
        case "fma" | "mul":
            product = _floats(a, dtype).double() * _floats(rest[0], dtype).double()
            if len(rest) == 2:
                product = product + _floats(rest[1], dtype).double()
            return _word(product.to(dtype))
        case "sub":
            return _word32(_float32(a) - _float32(rest[0]))
        case "cvt":
            assert op == "cvt.rn.bf16x2.f32"
            return _word(torch.stack([_float32(rest[0]), _float32(a)], dim=-1).bfloat16())
    raise AssertionError(op)


def _of_three(a: Tensor, b: Tensor, c: Tensor, table: int) -> Tensor:
    """Bit `4 * a + 2 * b + c` of the table, for the bits of three words."""
    picked = (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1) for i in range(32))
    return sum(((table >> pick & 1) << i for i, pick in enumerate(picked)), torch.tensor(0))


def _floats(word: Tensor, dtype: torch.dtype) -> Tensor:
    """Two of 16 bits, the last axis"""
    return torch.stack([word & 0xFFFF, word >> 16], dim=-1).to(torch.uint16).view(dtype)


def _word(floats: Tensor) -> Tensor:
    halves = floats.contiguous().view(torch.int16).long() & 0xFFFF
    return halves[..., 0] | halves[..., 1] << 16


def _float32(word: Tensor) -> Tensor:
    return word.to(torch.uint32).view(torch.float32)


def _word32(value: Tensor) -> Tensor:
    return value.view(torch.int32).long() & 0xFFFFFFFF
