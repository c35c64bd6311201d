"""The pickle in a `.pt` file as dicts, texts, numbers and records of tensors; nothing is imported or called.

There is no unpickler here that a file could fool: a small machine runs the opcodes that data need. The few
functions of torch that make tensors have a stand-in; whatever else a pickle names becomes an `Unknown`, so
that a file may hold anything beside its tensors.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ups_store.format.metadata import DTYPE_NAMES

MAX_BYTES = 4 << 20  # each may become an object of about 60
MAX_AXES = 32

_STORAGES = {
    **{"Bool": "bool", "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64"},
    **{"Half": "float16", "BFloat16": "bfloat16", "Float": "float32", "Double": "float64"},
    **{"ComplexFloat": "complex64", "ComplexDouble": "complex128"},
}


class RefusalError(Exception):
    """Why a file or a value is refused, without the file's name."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Stands for an object of a class, or the result of a function, that isn't imported."""

    name: str


@dataclass(frozen=True, slots=True)
class Storage:
    """Where tensors lie: the name of its dtype, None if it is of bytes, and its name in the archive."""

    dtype: str | None
    key: str


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor as the pickle describes it; nothing of it is checked yet.

    Attributes:
        storage: Where its elements lie.
        offset: The first of them, counted in elements, as are the strides.
        shape: Its shape.
        strides: From one index to the next of each axis.
        dtype: Name of its dtype.
        is_plain: Whether the stored numbers are its own, and not their negative or conjugate.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str | None
    is_plain: bool


def unpickled(stream: bytes) -> Any:
    """What a pickle holds.

    Returns:
        None, booleans, numbers, texts, bytes, lists, tuples, dicts of texts, `TensorRecord` or `Unknown`.
    Raises:
        RefusalError: If it is too long, or has an opcode that data don't need.
        Exception: Whatever a damaged one leads to.
    """
    if len(stream) > MAX_BYTES:
        raise RefusalError(f"{len(stream):,} bytes of it aren't tensors, expected at most {MAX_BYTES:,}")
    machine = _Machine()
    for opcode, argument, _ in pickletools.genops(stream):
        operation = _OPERATIONS.get(opcode.name)
        if operation is None:
            raise RefusalError(f"its pickle has the opcode {opcode.name}, which data don't need")
        operation(machine, argument)
    (document,) = machine.stack
    return document


@dataclass(frozen=True, slots=True)
class _Dtype:
    """A dtype, or the class of the storages that have it; None where the storage is of bytes."""

    name: str | None


@dataclass(frozen=True, slots=True)
class _Function:
    call: Callable[..., Any]


def _tensor_v2(
    storage: Storage,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: object = None,
    hooks: object = None,
    metadata: Mapping[str, object] | None = None,
) -> TensorRecord:
    if not isinstance(shape, tuple) or max(len(shape), len(strides), len(metadata or ())) > MAX_AXES:
        raise RefusalError(f"it has a tensor of more than {MAX_AXES} axes")
    is_plain = not any((metadata or {}).values())
    return TensorRecord(storage, offset, shape, strides, storage.dtype, is_plain)


def _tensor_v3(
    storage: Storage,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: object,
    hooks: object,
    dtype: _Dtype,
    metadata: Mapping[str, object] | None = None,
) -> TensorRecord:
    typed = Storage(dtype.name, storage.key)
    return _tensor_v2(typed, offset, shape, strides, requires_grad, hooks, metadata)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "collections OrderedDict": lambda: {},
    "torch._utils _rebuild_tensor_v2": _tensor_v2,
    "torch._utils _rebuild_tensor_v3": _tensor_v3,
    "torch._utils _rebuild_parameter": lambda data, requires_grad, hooks: data,
}
_GLOBALS: dict[str, _Dtype | _Function] = {
    **{name: _Function(call) for name, call in _FUNCTIONS.items()},
    "torch.storage UntypedStorage": _Dtype(None),
    **{f"torch {name}Storage": _Dtype(dtype) for name, dtype in _STORAGES.items()},
    **{f"torch {name}": _Dtype(name) for name in (*DTYPE_NAMES, "complex64", "complex128")},
}


class _Machine:
    """The stack and memory that opcodes work on; operations take the opcode's argument."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def put(self, number: int | None) -> None:
        self._memo[len(self._memo) if number is None else number] = self.stack[-1]

    def get(self, number: int) -> None:
        self.stack.append(self._memo[number])

    def mark(self, _: None) -> None:
        self._marks.append(len(self.stack))

    def pop_marked(self, _: None = None) -> list[Any]:
        first = self._marks.pop()
        items = self.stack[first:]
        del self.stack[first:]
        return items

    def make_tuple(self, _: None) -> None:
        self.stack.append((*self.pop_marked(),))

    def make_tuple_of(self, num: int) -> None:
        items = (*self.stack[-num:],)
        del self.stack[-num:]
        self.stack.append(items)

    def take(self, name: str) -> None:
        """A class or function by module and name; one that isn't known stays what it is called."""
        self.stack.append(_GLOBALS.get(name) or Unknown(name.replace(" ", ".")))

    def take_from_stack(self, _: None) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.take(f"{module} {name}")

    def call(self, _: None) -> None:
        """The result of a function, or an object of a class."""
        arguments, function = self.stack.pop(), self.stack.pop()
        self.stack.append(function.call(*arguments) if isinstance(function, _Function) else function)

    def call_with_options(self, _: None) -> None:
        self.stack.pop()
        self.call(None)

    def find_storage(self, _: None) -> None:
        _, kind, key, _, _ = self.stack.pop()
        if not isinstance(kind, _Dtype) or not isinstance(key, str):
            raise RefusalError("it has a storage of an unknown kind")
        self.stack.append(Storage(kind.name, key))

    def set_item(self, _: None) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._fill([key, value])

    def set_items(self, _: None) -> None:
        self._fill(self.pop_marked())

    def append(self, _: None) -> None:
        self._extend([self.stack.pop()])

    def extend(self, _: None) -> None:
        self._extend(self.pop_marked())

    def make_set(self, _: None = None) -> None:
        self.stack.append(Unknown("builtins.set"))

    def frozen_set(self, _: None) -> None:
        self.pop_marked()
        self.make_set()

    def _fill(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, dict):  # else it is an object, of which nothing is kept
            target.update(zip(map(_key, items[::2]), items[1::2], strict=True))

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target += items


def _key(key: object) -> str:
    """A key as a text: texts can't be made to collide in a dict, nor to take long to compare."""
    if isinstance(key, str):
        return key
    is_short = isinstance(key, (float, type(None))) or (isinstance(key, int) and key.bit_length() < 64)
    return str(key) if is_short else f"({type(key).__name__})"


def _pushing(make: Callable[[], Any]) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.stack.append(make())


_OPERATIONS: dict[str, Callable[[_Machine, Any], object]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, _: None),
    **dict.fromkeys(
        (
            *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
            *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
        ),
        lambda machine, argument: machine.stack.append(argument),
    ),
    "NONE": _pushing(lambda: None),
    "NEWTRUE": _pushing(lambda: True),
    "NEWFALSE": _pushing(lambda: False),
    "EMPTY_TUPLE": _pushing(lambda: ()),
    "EMPTY_LIST": _pushing(list),
    "EMPTY_DICT": _pushing(dict),
    "EMPTY_SET": _Machine.make_set,
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
    "MARK": _Machine.mark,
    "POP_MARK": _Machine.pop_marked,
    "POP": lambda machine, _: machine.stack.pop(),
    "TUPLE": _Machine.make_tuple,
    **{f"TUPLE{num}": partial(lambda num, machine, _: machine.make_tuple_of(num), num) for num in (1, 2, 3)},
    "GLOBAL": _Machine.take,
    "STACK_GLOBAL": _Machine.take_from_stack,
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Machine.call),
    "NEWOBJ_EX": _Machine.call_with_options,
    "BINPERSID": _Machine.find_storage,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "APPEND": _Machine.append,
    **dict.fromkeys(("APPENDS", "ADDITEMS"), _Machine.extend),
    "FROZENSET": _Machine.frozen_set,
    "BUILD": lambda machine, _: machine.stack.pop(),  # attributes, such as those of a model's state dict
}
