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

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=SimpleNamespace(parent=None))

    def __neg__(self) -> "Values":
        return Values(-self.data)

    def __radd__(self, other: Any) -> Any:
        return self + other

    def __rmul__(self, other: Any) -> Any:
        return self * other


def _operation(name: str) -> Callable[[Any, Any], Any]:
    def apply(self: Values, other: Any) -> Any:
        if isinstance(other, Pointers):
            return other + self
        return Values(getattr(operator, name)(self.data, other.data if isinstance(other, Values) else other))

    return apply


for _name in ("add", "sub", "mul", "and_", "or_", "xor", "lshift", "rshift", "eq", "ge", "lt", "floordiv", "mod"):
    setattr(Values, f"__{_name.strip('_')}__", _operation(_name))


class Pointers:
    def __init__(self, memory: Tensor, places: Tensor | None = None) -> None:
        self.memory = memory.flatten()
        self.dtype = SimpleNamespace(element_ty=torch.float32)
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

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> "Shared":
        return Shared(self.data.view(shape))

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
    assert constraints.count("=") == len(results) and constraints.count(",") + 1 == len(results) + len(words)
    planes = run(asm, words, len(results))
    if pack == 1:
        singles = tuple(
            Values(plane.to(torch.uint32).view(dtype)) for plane, dtype in zip(planes, results, strict=True)
        )
        return singles if several else singles[0]
    found = tuple(Values(_from_words(plane, dtype)) for plane, dtype in zip(planes, results, strict=True))
    return found if several else found[0]


def _data(value: Any) -> Tensor:
    return value.data if isinstance(value, Values) else torch.tensor(value, dtype=torch.int32)


def _load(pointers: Pointers, mask: Values | None = None, other: float = 0, **hints: str) -> Values:
    """What must not be read is not there."""
    if mask is None:
        return Values(pointers.memory[pointers.places])
    inside = mask.data.expand(pointers.places.shape)
    values = torch.full(pointers.places.shape, other, dtype=pointers.memory.dtype)
    values[inside] = pointers.memory[pointers.places[inside]]
    return Values(values)


def _store(pointers: Pointers, values: Values, mask: Values) -> None:
    inside = mask.data.expand(pointers.places.shape)
    pointers.memory[pointers.places[inside]] = values.data[inside]


def _number(value: Any) -> Any:
    return Values(torch.tensor(value, dtype=torch.int64)) if isinstance(value, int) else value


def _minimum(a: Any, b: Any) -> Any:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else Values(torch.minimum(_data(a), _data(b)))


def _where(chosen: Any, a: Any, b: Any) -> Any:
    if isinstance(chosen, bool):
        return a if chosen else b
    return Values(torch.where(chosen.data, _data(a), _data(b)))


def _layout(*args: Any) -> SimpleNamespace:
    return SimpleNamespace(parent=None)


GL = SimpleNamespace(
    **DTYPES,
    static_range=range,
    constexpr=object,
    load=_load,
    store=_store,
    minimum=_minimum,
    cdiv=lambda a, b: -(-a // b),
    arange=lambda first, last, layout: Values(torch.arange(first, last, dtype=torch.int32)),
    zeros=lambda shape, dtype, layout: Values(torch.zeros(shape, dtype=dtype)),
    sum=lambda values, axis: Values(values.data.sum(axis)),
    split=lambda values: tuple(Values(part) for part in values.data.unbind(-1)),
    convert_layout=lambda values, layout, assert_trivial: values,
    allocate_shared_memory=lambda dtype, shape, layout: Shared(torch.zeros(shape, dtype=dtype)),
    BlockedLayout=_layout,
    SliceLayout=_layout,
    SwizzledSharedLayout=_layout,
    cast=lambda value, dtype: _number(value).to(dtype),
    where=_where,
    join=lambda a, b: Values(torch.stack([a.data, b.data], dim=-1)),
    inline_asm_elementwise=_inline_asm,
)


def run_programs(kernel: Callable[..., None], count: int, *args: Any, **constants: Any) -> None:
    """All programs of a launch, one after the other."""
    GL.num_programs = lambda axis: count
    for number in range(count):
        GL.program_id = lambda axis, number=number: number
        kernel(*args, **constants)


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
