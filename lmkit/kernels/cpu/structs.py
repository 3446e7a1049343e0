"""Arguments of compiled tasks by name. A struct is a NamedTuple of integers and other structs. In memory it is its
integers in a row, int64 each. A task and its callers share the class, so a new argument is a new field.
"""

from __future__ import annotations

from typing import Any, get_type_hints

from numba import types
from numba.extending import intrinsic

from lmkit.kernels.cpu.emit import I64


def numbers(struct: tuple[Any, ...]) -> list[int]:
    """A struct's integers in their order in memory."""
    flat: list[int] = []
    for item in struct:
        if isinstance(item, int):
            flat.append(item)
        else:
            flat += numbers(item)
    return flat


def num_bytes(struct: type) -> int:
    """Bytes of a struct of this class in memory."""
    return sum(8 if kind is int else num_bytes(kind) for kind in get_type_hints(struct).values())


def _type_of(struct: type) -> Any:
    kinds = [types.int64 if kind is int else _type_of(kind) for kind in get_type_hints(struct).values()]
    return types.BaseTuple.from_types(kinds, struct)


@intrinsic
def read(typing: Any, address: Any, struct: Any) -> Any:
    """The struct at `address`. `struct` is its class. Unused fields cost nothing."""
    result = _type_of(struct.instance_class)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start, place = builder.inttoptr(arguments[0], I64.as_pointer()), iter(range(1 << 16))

        def load(kind: Any) -> Any:
            if kind == types.int64:
                return builder.load(builder.gep(start, [I64(next(place))]), typ=I64)
            return context.make_tuple(builder, kind, [load(item) for item in kind.types])

        return load(result)

    return result(types.int64, struct), codegen


@intrinsic
def write(typing: Any, address: Any, struct: Any) -> Any:
    """Write a struct to `address`, for `read`."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start, place = builder.inttoptr(arguments[0], I64.as_pointer()), iter(range(1 << 16))

        def store(kind: Any, value: Any) -> None:
            if isinstance(kind, types.BaseTuple):
                for i, item in enumerate(kind.types):
                    store(item, builder.extract_value(value, i))
            else:
                number = context.cast(builder, value, kind, types.int64)
                builder.store(number, builder.gep(start, [I64(next(place))]))

        store(struct, arguments[1])
        return context.get_dummy_value()

    return types.void(types.int64, struct), codegen
