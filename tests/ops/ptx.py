"""Instructions of a GPU, carried out in Python: what unpacks quantized values is tested without one."""

from collections.abc import Sequence

import torch
from torch import Tensor


def execute(asm: str, words: Sequence[int | Tensor], num_planes: int, dtype: torch.dtype) -> list[Tensor]:
    """What the instructions make of two words, and of a third with two halves: planes of two floats each."""
    return [_floats(plane, dtype) for plane in run(asm, [torch.as_tensor(word) for word in words], num_planes)]


def run(asm: str, words: Sequence[Tensor], num_results: int) -> list[Tensor]:
    """Words are tensors of int64, of 32 bits each; so are the results."""
    registers = {f"${num_results + i}": word for i, word in enumerate(words)}
    for line in asm.strip().removeprefix("{").removesuffix("}").split(";"):
        op, _, operands = line.strip().partition(" ")
        if not op:
            continue
        if op == ".reg":
            registers |= dict.fromkeys(_declared(operands.partition(" ")[2]), torch.tensor(0))
            continue
        if op.startswith("mma."):
            assert op == "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
            targets, *tiles = (names.strip("{ ").split(", ") for names in operands.rstrip("}").split("}, "))
            registers |= dict(
                zip(targets, _mma(*([registers[name] for name in names] for names in tiles)), strict=True)
            )
            continue
        if operands.startswith("{"):
            low, high, word = operands.replace("}", "").removeprefix("{").split(", ")
            registers |= {low: registers[word] & 0xFFFF, high: registers[word] >> 16}
            continue
        target, *sources = operands.split(", ")
        if sources[0].startswith("{"):  # two halves
            low, high = sources[0].strip("{}").split(",")
            registers[target] = registers[low] | registers[high] << 16
            continue
        registers[target] = _result(op, [registers[o] if o in registers else torch.tensor(_number(o)) for o in sources])
    return [registers[f"${i}"] for i in range(num_results)]


def _declared(names: str) -> list[str]:
    """`a, b<2>`, which are a, b0 and b1"""
    declared = []
    for name in names.split(", "):
        stem, _, count = name.rstrip(">").partition("<")
        declared += [f"{stem}{i}" for i in range(int(count))] if count else [stem]
    return declared


def _number(word: str) -> int:
    return int(word[2:], 16) if word.startswith("0f") else int(word, 0)


def _mma(a: list[Tensor], b: list[Tensor], c: list[Tensor]) -> list[Tensor]:
    """Registers of warps, one lane after the other: a [16, 16] times b [16, 8], plus c [16, 8]"""
    lanes = [word.reshape(-1, 8, 4) for word in (*a, *b)]
    quads = [_floats(word, torch.float16).double() for word in lanes]  # [warps, row or column, 4, 2]
    upper, lower = (torch.cat([quads[i].flatten(2), quads[i + 2].flatten(2)], dim=2) for i in (0, 1))
    columns = torch.cat([quads[4].flatten(2), quads[5].flatten(2)], dim=2)
    sums = torch.cat([upper, lower], dim=1) @ columns.transpose(1, 2)  # [warps, 16, 8]
    parts = sums.view(-1, 2, 8, 4, 2)
    found = []
    for number, word in enumerate(c):
        part = parts[:, number // 2, :, :, number % 2].flatten()
        found.append(_word32((part + _float32(word.expand(part.shape)).double()).float()))
    return found


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
        case "add" if op == "add.rn.f16x2":
            return _word((_floats(a, dtype).double() + _floats(rest[0], dtype).double()).to(dtype))
        case "add":
            return a + rest[0] & 0xFFFFFFFF
        case "shf" if op == "shf.l.wrap.b32":
            return ((rest[0] << 32 | a) << rest[1] >> 32) & 0xFFFFFFFF
        case "lop3":
            return _of_three(a, rest[0], rest[1], table=int(rest[2]))
        case "prmt":
            a, b, picks = torch.broadcast_tensors(a, *rest)
            both = torch.stack([word >> 8 * i & 255 for word in (a, b) for i in range(4)])
            picked = [both.gather(0, (picks >> 4 * i & 15)[None])[0] for i in range(4)]  # the top bit is refused
            return sum((byte << 8 * i for i, byte in enumerate(picked)), torch.tensor(0))
        case "mul" if op == "mul.lo.u32":
            return a * rest[0] & 0xFFFFFFFF
        case "fma" | "mul":
            product = _floats(a, dtype).double() * _floats(rest[0], dtype).double()
            if len(rest) == 2:
                product = product + _floats(rest[1], dtype).double()
            return _word(product.to(dtype))
        case "sub":
            return _word32(_float32(a) - _float32(rest[0]))
        case "cvt" if op == "cvt.f32.f16":
            return _word32(_floats(a, torch.float16)[..., 0].float())
        case "cvt":
            assert op == "cvt.rn.bf16x2.f32"
            return _word(torch.stack([_float32(rest[0]), _float32(a)], dim=-1).bfloat16())
    raise AssertionError(op)


def _of_three(a: Tensor, b: Tensor, c: Tensor, table: int) -> Tensor:
    """Bit `4 * a + 2 * b + c` of the table, for the bits of three words."""
    if table == 0xEA:
        return a & b | c
    picked = (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1) for i in range(32))
    return sum(((table >> pick & 1) << i for i, pick in enumerate(picked)), torch.tensor(0))


def _floats(word: Tensor, dtype: torch.dtype) -> Tensor:
    """Two of 16 bits, the last axis"""
    return word.to(torch.int32).unsqueeze(-1).view(dtype)


def _word(floats: Tensor) -> Tensor:
    return floats.contiguous().view(torch.int32).squeeze(-1).long() & 0xFFFFFFFF


def _float32(word: Tensor) -> Tensor:
    return word.to(torch.int32).view(torch.float32)


def _word32(value: Tensor) -> Tensor:
    return value.view(torch.int32).long() & 0xFFFFFFFF
