"""What fits: weights and a context of well-known shapes against the memory that is free."""

from dataclasses import dataclass

CONTEXT = 4096  # tokens
WORKSPACE = 256 << 20  # bytes for Python, activations and logits
BITS = {"q4": 4.85, "q8": 8.5, "f16": 16.0}  # bits a weight as stored, scales included; q4 as in Q4_K_M files
_KV_BYTES = 2  # a number of the KV cache, fp16


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    num_weights: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def kv_bytes(self, num_tokens: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * _KV_BYTES * num_tokens  # keys and values


SHAPES = (
    Shape("SmolLM2 135M (the default)", 134_515_008, 30, 3, 64),
    Shape("Llama 3.2 1B", 1_235_814_400, 16, 8, 64),
    Shape("Llama 3.2 3B", 3_212_749_824, 28, 8, 128),
    Shape("Llama 3.1 8B", 8_030_261_248, 32, 8, 128),
)


@dataclass(frozen=True, slots=True)
class Fit:
    shape: Shape
    bits: str
    needed: int  # bytes
    fits: bool


def fits(available: int) -> list[Fit]:
    """Every shape in every width, against `available` bytes."""
    rows = []
    for shape in SHAPES:
        for name, bits in BITS.items():
            needed = int(shape.num_weights * bits / 8) + shape.kv_bytes(CONTEXT) + WORKSPACE
            rows.append(Fit(shape, name, needed, needed <= available))
    return rows
