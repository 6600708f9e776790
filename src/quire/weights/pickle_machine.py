"""A pickle as data: an interpreter of the few opcodes that a state dict needs.

A pickle is a program in which GLOBAL names any function of any module. Here a global is looked up in the caller's
table, or the file is refused. Nothing is imported, and only dictionaries, lists, tuples, numbers, text and results of
the table's functions can come out. The number of steps is bounded by the number of bytes."""

import struct
from collections.abc import Callable, Mapping
from typing import Any

MAX_PICKLE_BYTES = 64 << 20
MAX_STACK = 1 << 20


class PickleRefused(Exception):
    """`problem` continues a sentence about the pickle."""

    def __init__(self, offset: int, problem: str) -> None:
        super().__init__(problem)
        self.offset = offset  # in the pickle
        self.problem = problem


class _Mark:
    pass


_MARK = _Mark()


def unpickle_data(code: bytes, table: Mapping[tuple[str, str], Any], persistent: Callable[[Any], Any]) -> Any:
    """-> the object of the pickle. REDUCE calls functions of `table`; `persistent` maps persistent ids to objects."""
    machine = _Machine(code, table, persistent)
    try:
        while not machine.done:
            machine.step()
    except (IndexError, struct.error) as error:
        raise PickleRefused(machine.offset, "ends in the middle, or takes from an empty stack") from error
    except KeyError as error:
        raise PickleRefused(machine.offset, f"asks for value {error}, which it has not kept") from error
    except (ValueError, TypeError) as error:
        raise PickleRefused(machine.offset, str(error)) from error
    return machine.stack[-1]


class _Machine:
    def __init__(self, code: bytes, table: Mapping[tuple[str, str], Any], persistent: Callable[[Any], Any]) -> None:
        self.code, self.table, self.persistent = code, table, persistent
        self.offset, self.done = 0, False
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def step(self) -> None:
        opcode = self.code[self.offset : self.offset + 1]
        action = _ACTIONS.get(opcode)
        if action is None:
            raise PickleRefused(
                self.offset, f"uses the opcode {opcode!r}, which a dictionary of tensors has no need of"
            )
        self.offset += 1
        action(self)
        if len(self.stack) > MAX_STACK:
            raise PickleRefused(self.offset, f"piles up more than {MAX_STACK} values")

    # -- reading what follows an opcode ----------------------------------------------------------------------------

    def number(self, form: str) -> Any:
        size = struct.calcsize(form)
        value = struct.unpack_from(form, self.code, self.offset)[0]
        self.offset += size
        return value

    def take(self, length: int) -> bytes:
        if length > len(self.code) - self.offset:
            raise ValueError(f"has {length} bytes of text where {len(self.code) - self.offset} are left")
        self.offset += length
        return self.code[self.offset - length : self.offset]

    def line(self) -> str:
        end = self.code.index(b"\n", self.offset)
        text = self.code[self.offset : end].decode()
        self.offset = end + 1
        return text

    # -- working on the stack --------------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("takes a mark for a value")
        return value

    def pop_to_mark(self) -> list[Any]:
        index = len(self.stack) - 1
        while self.stack[index] is not _MARK:
            index -= 1
            if index < 0:
                raise ValueError("misses a mark")
        values = self.stack[index + 1 :]
        del self.stack[index:]
        return values

    def top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise ValueError(f"fills something that is no {kind.__name__}")
        return self.stack[-1]

    def find(self, module: str, name: str) -> None:
        if (module, name) not in self.table:
            raise ValueError(f"names `{module}.{name}`, which a dictionary of tensors has no need of")
        self.push(self.table[module, name])

    # -- opcodes ---------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        if not self.stack or self.stack[-1] is _MARK:
            raise ValueError("makes nothing")
        self.done = True

    def stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        self.find(str(module), str(name))

    def reduce(self) -> None:
        arguments, function = self.pop(), self.pop()
        if not callable(function) or not isinstance(arguments, tuple) or (function is dict and arguments):
            raise ValueError("calls something that is no function of tensors")
        self.push(function(*arguments))

    def build(self) -> None:
        """Drop the state of an object: for a state dict, the versions of its modules."""
        self.pop()
        self.top(dict)

    def set_items(self) -> None:
        values = self.pop_to_mark()
        self.top(dict).update(zip(values[::2], values[1::2], strict=True))

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.top(dict)[key] = value

    def appends(self) -> None:
        values = self.pop_to_mark()
        self.top(list).extend(values)

    def append(self) -> None:
        value = self.pop()
        self.top(list).append(value)

    def tuple_of(self, count: int) -> None:
        values = [self.pop() for _ in range(count)]
        self.push(tuple(reversed(values)))

    def long(self) -> None:
        self.push(int.from_bytes(self.take(self.number("<B")), "little", signed=True))

    def text(self, form: str) -> None:
        self.push(self.take(self.number(form)).decode())

    def memoize(self, index: int) -> None:
        self.memo[index] = self.stack[-1]


_ACTIONS: dict[bytes, Callable[[_Machine], Any]] = {
    b"\x80": lambda m: m.number("<B"),  # PROTO
    b"\x95": lambda m: m.number("<Q"),  # FRAME
    b".": _Machine.stop,
    b"(": lambda m: m.push(_MARK),
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"K": lambda m: m.push(m.number("<B")),
    b"M": lambda m: m.push(m.number("<H")),
    b"J": lambda m: m.push(m.number("<i")),
    b"\x8a": _Machine.long,
    b"G": lambda m: m.push(m.number(">d")),
    b"X": lambda m: m.text("<I"),
    b"\x8c": lambda m: m.text("<B"),
    b"]": lambda m: m.push([]),
    b"}": lambda m: m.push({}),
    b")": lambda m: m.push(()),
    b"t": lambda m: m.push(tuple(m.pop_to_mark())),
    b"\x85": lambda m: m.tuple_of(1),
    b"\x86": lambda m: m.tuple_of(2),
    b"\x87": lambda m: m.tuple_of(3),
    b"s": _Machine.set_item,
    b"u": _Machine.set_items,
    b"a": _Machine.append,
    b"e": _Machine.appends,
    b"q": lambda m: m.memoize(m.number("<B")),
    b"r": lambda m: m.memoize(m.number("<I")),
    b"\x94": lambda m: m.memoize(len(m.memo)),
    b"h": lambda m: m.push(m.memo[m.number("<B")]),
    b"j": lambda m: m.push(m.memo[m.number("<I")]),
    b"c": lambda m: m.find(m.line(), m.line()),
    b"\x93": _Machine.stack_global,
    b"R": _Machine.reduce,
    b"b": _Machine.build,
    b"Q": lambda m: m.push(m.persistent(m.pop())),  # BINPERSID
}
