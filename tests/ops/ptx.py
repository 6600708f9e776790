"""Instructions of a GPU, carried out in Python: what unpacks quantized values is tested without one."""

import torch
from torch import Tensor


def execute(asm: str, words: tuple[int, ...], num_planes: int, dtype: torch.dtype) -> list[Tensor]:
    """What the instructions make of two words, and of a third with two halves: planes of two floats each."""
    registers = {f"${num_planes + i}": word for i, word in enumerate(words)}

    def floats(word: int) -> Tensor:
        return torch.tensor([word & 0xFFFF, word >> 16]).to(torch.uint16).view(dtype)

    for line in asm.strip("{}\n").replace(";", "").splitlines():
        op, _, operands = line.partition(" ")
        if op == ".reg":
            registers |= dict.fromkeys(operands.removeprefix(".b32 ").split(", "), 0)
            continue
        target, *sources = operands.split(", ")
        a, *rest = (registers[o] if o in registers else int(o, 0) for o in sources)
        match op.split(".")[0]:
            case "mov":
                result = a
            case "and":
                result = a & rest[0]
            case "or":
                result = a | rest[0]
            case "xor":
                result = a ^ rest[0]
            case "shr":
                result = a >> rest[0]
            case "shl":
                result = a << rest[0] & 0xFFFFFFFF
            case "add":
                result = a + rest[0] & 0xFFFFFFFF
            case "lop3":
                result = _of_three(a, rest[0], rest[1], table=rest[2])
            case "prmt":
                both = a | rest[0] << 32
                picks = [rest[1] >> 4 * i & 15 for i in range(4)]
                assert max(picks) < 8  # the top bit would spread a sign
                result = sum((both >> 8 * pick & 255) << 8 * i for i, pick in enumerate(picks))
            case "mul" if op == "mul.lo.u32":
                result = a * rest[0] & 0xFFFFFFFF
            case "fma" | "mul":
                product = floats(a).double() * floats(rest[0]).double()
                if len(rest) == 2:
                    product += floats(rest[1]).double()
                low, high = product.to(dtype).view(torch.uint16).tolist()
                result = low | high << 16
            case _:
                raise AssertionError(line)
        registers[target] = result
    return [floats(registers[f"${plane}"]) for plane in range(num_planes)]


def _of_three(a: int, b: int, c: int, table: int) -> int:
    """Bit `4 * a + 2 * b + c` of the table, for the bits of three words."""
    return sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32))
