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
    cache_sizes_of_elements()
    unwrap_by_type()
    call_builtins_directly()
    decide_types_once()
    broadcast_by_shape()
    reduce_slice_by_slice()
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
        sizes = tuple(each.value if isinstance(each, core.constexpr) else each for each in shape)
        key = element_ty.name, sizes
        if key not in types:
            make_type(self, element_ty, list(sizes))
            types[key] = {**self.__dict__, "sizes": sizes}
        self.__dict__.update(types[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        shape = getattr(type, "sizes", ())
        if shape not in shapes:
            sizes = [core.constexpr(size) for size in shape]
            shapes[shape] = core.constexpr(math.prod(shape)), core.tuple(sizes)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[shape]

    core.block_type.__init__ = init_type
    core.tensor.__init__ = init_tensor


def cache_sizes_of_elements() -> None:
    """Every array is checked to be no wider than its type, when it is computed and again when it is kept."""
    validate, valid = interpreter._validate_np_data_size, {}

    def look_up(array: Any, dtype: Any) -> bool:
        key = array.itemsize, dtype.name
        if key not in valid:
            valid[key] = validate(array, dtype)
        return valid[key]

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if not valid.get((data.itemsize, dtype.name)):
            self.__post_init__()  # which asks the function above, and refuses

    interpreter._validate_np_data_size = look_up
    interpreter.TensorHandle.__init__ = init


def unwrap_by_type() -> None:
    """What is no constexpr, nor a list or tuple of them, is asked of every argument of an op."""
    unwrap = core._unwrap_if_constexpr
    plain = {core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str, type(None)}
    core._unwrap_if_constexpr = lambda x: x if type(x) in plain else unwrap(x)


def call_builtins_directly() -> None:
    """A builtin's wrapper checks that it has its argument `_semantic`, which the interpreter always gives."""

    def patch(scope_of: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function, own = getattr(member, "__wrapped__", member), semantic.TritonSemantic(builder)

        def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
            return function(*args, **kwargs, _semantic=own)

        scope.set_attr(scope_of, name, call)

    interpreter._patch_attr = patch


def number_key(x: Any) -> Any:
    """What tells a Python number from others, of which 1 == 1.0 == True; None of anything else."""
    return (type(x), x) if type(x) in (int, float, bool) else None


def decide_types_once() -> None:
    """The types of a binary operation's operands decide to which type each is cast, or that they are refused."""
    semantics, equal = semantic.TritonSemantic, core.dtype.__eq__
    check, decided, constants = semantics.binary_op_type_checking_impl, {}, {}

    def compare(self: Any, other: Any) -> Any:
        return self is other or (self.name == other.name if type(other) is core.dtype else equal(self, other))

    def as_type(self: Any, x: Any, number: Any, dtype: Any) -> Any:
        if number is None:
            return x if x.dtype.name == dtype.name else self.cast(x, dtype)
        key = number, dtype.name
        if key not in constants:
            constants[key] = self.scalar_constant(x, dtype)
        return constants[key]

    def look_up(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> Any:
        left = None if isinstance(lhs, core.tensor) else number_key(lhs)
        right = None if isinstance(rhs, core.tensor) else number_key(rhs)
        key = left or lhs.dtype.name, right or rhs.dtype.name, flags, *named.items()
        if key not in decided:
            lhs, rhs = check(self, lhs, rhs, *flags, **named)
            decided[key] = lhs.dtype, rhs.dtype
            return lhs, rhs
        types = decided[key]
        return self.broadcast_impl_value(as_type(self, lhs, left, types[0]), as_type(self, rhs, right, types[1]))

    core.dtype.__eq__ = compare
    semantics.binary_op_type_checking_impl = look_up


def broadcast_by_shape() -> None:
    """Operands of one shape stay as they are; of two, the shapes decide what becomes of each."""
    semantics = semantic.TritonSemantic
    broadcast, sizes_of = semantics.broadcast_impl_value, {}

    def spread(self: Any, x: Any, sizes: Any) -> Any:
        data = x.handle.data
        filled = np.full(sizes, data, dtype=data.dtype) if data.size == 1 else np.broadcast_to(data, sizes)
        return self.tensor(interpreter.TensorHandle(filled, x.dtype), core.block_type(x.dtype, sizes))

    def look_up(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        key = id(lhs.shape), id(rhs.shape)  # which cache_shapes() keeps
        if key not in sizes_of:
            found = broadcast(self, lhs, rhs)
            sizes_of[key] = found[0].type.sizes, found[0].shape
            return found
        sizes, shape = sizes_of[key]
        lhs = lhs if lhs.shape is shape else spread(self, lhs, sizes)
        return lhs, rhs if rhs.shape is shape else spread(self, rhs, sizes)

    semantics.broadcast_impl_value = look_up


def reduce_slice_by_slice() -> None:
    """The interpreter calls a function that combines two elements once for each element. Here it is given all elements
    of two slices at once, in the same order along the axis."""

    def reduce(self: Any, operands: Any) -> Any:
        tensors, axis = self.unravel(operands, self.axis)
        along = [np.moveaxis(each.handle.data, axis, 0) for each in tensors]
        total = slice_of(self, tensors, along, 0)
        for number in range(1, len(along[0])):
            combined = self.combine_fn.fn(*total, *slice_of(self, tensors, along, number))
            total = combined if isinstance(combined, tuple) else (combined,)
        rank = operands[0].handle.data.ndim
        return [pack(self, one, each, axis, rank) for one, each in zip(total, tensors, strict=True)]

    def slice_of(self: Any, tensors: Any, along: Any, number: int) -> Any:
        return tuple(self.to_tensor(data[number], each.dtype) for data, each in zip(along, tensors, strict=True))

    def pack(self: Any, total: Any, given: Any, axis: int, rank: int) -> Any:
        shape = list(given.handle.data.shape)
        del shape[axis]
        if self.keep_dims:
            shape = [1] * rank if self.axis is None else [*shape[:axis], 1, *shape[axis:]]
        data = total.handle.data.reshape(shape)
        return self.to_tensor(data if shape else data.item(), given.dtype)

    interpreter.ReduceOps.generic_reduce = reduce


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
