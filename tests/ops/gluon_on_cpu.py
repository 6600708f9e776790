"""Functions written in Gluon, carried out on a CPU: Triton's interpreter does not know the language.

Tensors are torch's, layouts are ignored, and shared memory is a tensor. Instructions are carried out by ops/ptx.py."""

import operator
from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ops.ptx import run

DTYPES = {name: getattr(torch, name) for name in ("int16", "int32", "int64", "uint8", "float16", "float32", "bfloat16")}


class Values:
    """A tensor in registers."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.shape = tuple(data.shape)
        self.dtype = data.dtype

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> "Values":
        return Values(self.data.view(dtype) if bitcast else self.data.to(dtype))

    def __getitem__(self, index: Any) -> "Values":
        return Values(self.data[index])

    def reshape(self, shape: list[int]) -> "Values":
        return Values(self.data.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> "Values":
        return Values(self.data.permute(order))

    def __neg__(self) -> "Values":
        return Values(-self.data)

    def __radd__(self, other: Any) -> Any:
        return self + other


def _operation(name: str) -> Callable[[Any, Any], Any]:
    def apply(self: Values, other: Any) -> Any:
        if isinstance(other, Pointers):
            return other + self
        return Values(getattr(operator, name)(self.data, other.data if isinstance(other, Values) else other))

    return apply


for _name in ("add", "sub", "mul", "and_", "or_", "xor", "rshift", "eq", "floordiv", "mod"):
    setattr(Values, f"__{_name.strip('_')}__", _operation(_name))


class Pointers:
    def __init__(self, memory: Tensor, places: Tensor | None = None) -> None:
        self.memory = memory.flatten()
        self.places = torch.zeros((), dtype=torch.int64) if places is None else places

    def __add__(self, other: Any) -> "Pointers":
        return Pointers(self.memory, self.places + (other.data if isinstance(other, Values) else other))


class Shared:
    """Shared memory."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def index(self, number: int) -> "Shared":
        return Shared(self.data[number])

    def load(self, layout: Any) -> Values:
        return Values(self.data.clone())

    def store(self, values: Values) -> None:
        assert values.shape == tuple(self.data.shape), f"{values.shape} into {tuple(self.data.shape)}"
        self.data.copy_(values.data)


def _as_words(data: Tensor) -> Tensor:
    """Pairs of neighbours of 16 bits, as words of 32 bits in int64."""
    low, high = (data.contiguous().view(torch.int16)[..., i::2].long() & 0xFFFF for i in (0, 1))
    return low | high << 16


def _from_words(words: Tensor, dtype: torch.dtype) -> Tensor:
    halves = torch.stack([words & 0xFFFF, words >> 16], dim=-1).flatten(-2)
    return halves.to(torch.uint16).view(dtype)


def _inline_asm(
    asm: str, constraints: str, args: list[Values], dtypes: Any, is_pure: bool = True, pack: int = 1
) -> Any:
    given = torch.broadcast_tensors(*(arg.data for arg in args))
    several = isinstance(dtypes, tuple)
    results = dtypes if several else (dtypes,)
    words: list[Tensor] = []
    for tensor in given:
        if pack == 2 and tensor.element_size() == 2:
            words.append(_as_words(tensor))
        else:
            bits = tensor.contiguous().view(torch.int32).long() & 0xFFFFFFFF
            words += [bits] if pack == 1 else [bits[..., 0::2], bits[..., 1::2]]
    assert constraints.count("=r") == len(results) and constraints.count("r") == len(results) + len(words)
    planes = run(asm, words, len(results))
    if pack == 1:
        return Values(planes[0].to(torch.uint32).view(dtypes))
    found = tuple(Values(_from_words(plane, dtype)) for plane, dtype in zip(planes, results, strict=True))
    return found if several else found[0]


def _load(pointers: Pointers) -> Values:
    return Values(pointers.memory[pointers.places])


def _number(value: Any) -> Any:
    return Values(torch.tensor(value, dtype=torch.int64)) if isinstance(value, int) else value


GL = SimpleNamespace(
    **DTYPES,
    static_range=range,
    constexpr=object,
    load=_load,
    cast=lambda value, dtype: _number(value).to(dtype),
    where=lambda chosen, a, b: Values(torch.where(chosen.data, a.data, b.data)),
    join=lambda a, b: Values(torch.stack([a.data, b.data], dim=-1)),
    inline_asm_elementwise=_inline_asm,
)


def on_cpu(*modules: ModuleType) -> SimpleNamespace:
    """The functions of the modules, calling each other, with a language of torch's tensors."""
    names: dict[str, Any] = {}
    for module in modules:
        for name, value in vars(module).items():
            function = getattr(value, "fn", value)
            if isinstance(function, FunctionType):
                names[name] = FunctionType(function.__code__, names, name, function.__defaults__, function.__closure__)
            else:
                names[name] = getattr(value, "value", value)
    names |= {"gl": GL, "min": min, "max": max, "len": len}
    return SimpleNamespace(**names)
