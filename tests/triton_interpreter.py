"""Triton's interpreter as the tests use it: works with numpy 2.4, and runs kernels three times as fast.

Most of its time goes into Python objects that it makes anew for every op. What does not change is kept here."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.language import core, semantic
from triton.runtime import interpreter


def prepare() -> None:
    accept_scalar_bounds()
    patch_language_once()
    cache_dtypes()
    type_tuples_lazily()
    cache_shapes()
    check_overflow_in_numpy()
    multiply_alike_in_any_tile()


def accept_scalar_bounds() -> None:
    """Triton 3.6 makes a loop's bounds of arrays of one number, which numpy refuses since 2.4."""
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index


def patch_language_once() -> None:
    """The interpreter does it at every launch, and again at every call of a function inside a kernel."""
    patch, patched = interpreter._patch_lang, set()

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) not in patched:
            patched.add(id(function.__globals__))  # a module's, which lives as long as the process
            patch(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once


def cache_dtypes() -> None:
    """The interpreter makes a dictionary of all dtypes at every op."""
    make, made = interpreter._get_np_dtype, {}

    def look_up(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in made:
            made[scalar.name] = make(scalar)
        return made[scalar.name]

    interpreter._get_np_dtype = look_up


def type_tuples_lazily() -> None:
    """A shape is a tuple, and only the compiler asks for the type of a tuple."""

    def init(self: Any, args: Any, type: Any = None) -> None:
        self.values = list(args)
        if type is not None:
            self._type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def get_type(self: Any) -> Any:
        if "_type" not in self.__dict__:
            self._type = core._type_for_tuple_values(self.values)
        return self._type

    core.tuple.__init__ = init
    core.tuple.type = property(get_type, lambda self, type: self.__dict__.__setitem__("_type", type))


def cache_shapes() -> None:
    """Every result of an op has a type and a shape; few of them differ."""
    make_type = core.block_type.__init__
    types: dict[Any, dict[str, Any]] = {}  # (element type, shape) -> attributes of the block_type
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}  # shape -> numel and shape of a tensor, as constexprs

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(each.value if isinstance(each, core.constexpr) else each for each in shape)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(self.__dict__)
        self.__dict__.update(types[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in shapes:
            sizes = [core.constexpr(size) for size in shape]
            shapes[shape] = core.constexpr(math.prod(shape)), core.tuple(sizes)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[shape]

    core.block_type.__init__ = init_type
    core.tensor.__init__ = init_tensor


def check_overflow_in_numpy() -> None:
    """The same check of integer sums, differences and products, in one numpy operation instead of ten of Triton's."""
    wide = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def check(self: Any, lhs: Any, rhs: Any, op: Any) -> None:
        scalar = lhs.type.scalar
        if scalar.int_bitwidth < 64:
            exact = wide[op.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
            inside = scalar.get_int_min_value() <= exact.min() and exact.max() <= scalar.get_int_max_value()
            assert inside, f"int{scalar.int_bitwidth} overflow detected for operation {op.__name__}"

    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = check


def multiply_alike_in_any_tile() -> None:
    """`tl.dot` of fp32 sums in fp64, rounded once. A BLAS adds up in an order that depends on how many rows a matrix
    has (with AVX2, on multiples of 24), so a token would have other bits in other tiles, which on a GPU it has not."""
    create_dot = interpreter.InterpreterBuilder.create_dot

    def create_exact_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        eights = 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth)
        if eights or d.data.dtype != np.float32:
            return create_dot(self, a, b, d, *options)  # sums of these are exact, or few
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_exact_dot
