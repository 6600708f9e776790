"""Which fp8 values 4 bits stand for, looked up in registers: for w4a8.py and w4a8_wide.py."""

import torch


def look_up_instructions(words: range) -> str:
    """Some words of a quad -> two planes of each, four bytes each. The low three bits of four values pick four bytes
    among the first eight, and among the last eight; their top bits pick between the two."""
    values = torch.arange(-8.0, 8.0).to(torch.float8_e4m3fn).view(torch.uint8).tolist()
    entries = [sum(byte << 8 * i for i, byte in enumerate(values[j : j + 4])) for j in range(0, 16, 4)]
    lines = [".reg .b32 e0, e1, e2, e3, s, t, p, q;"]
    lines += [f"mov.b32 e{i}, 0x{entry:08X};" for i, entry in enumerate(entries)]
    for index, word in enumerate(words):
        source = f"${2 * len(words) + word}"
        lines += [f"and.b32 s, {source}, 0x77777777;", f"shr.u32 t, {source}, 1;"]
        lines.append("lop3.b32 t, t, 0x44444444, 0x32103210, 0xEA;")
        for half in (0, 1):
            if half:
                lines += ["shr.u32 s, s, 16;", "shr.u32 t, t, 16;"]
            lines += ["prmt.b32 p, e0, e1, s;", "prmt.b32 q, e2, e3, s;"]
            lines.append(f"prmt.b32 ${2 * index + half}, p, q, t;")
    return "{\n" + "\n".join(lines) + "\n}"
