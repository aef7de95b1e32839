"""Sixteen float32 numbers at a time, for the compiled loops: a Numba type with ``+ - *`` and ways in and out of memory.

Left to itself the compiler checks at every row whether the arrays overlap, which costs as much as a row of 128 does.
Processors with shorter registers take several for one vector.
Addresses are integers, in bytes, and need only the alignment of a float.
"""

# mypy: ignore-errors
from __future__ import annotations

import operator

import numba
import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.core.datamodel.models import PrimitiveModel
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, register_model

from spheret.kernels.loop_angles import COMMON

WIDTH, BYTES = 16, 64  # of one vector
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, WIDTH)
_FUSED = ("contract",)  # a product and the sum that it enters may be rounded once


class Lanes(types.Type):
    """The type of a vector of 16 float32."""

    def __init__(self):
        super().__init__("float32x16")


lanes = Lanes()


@register_model(Lanes)
class _Model(PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, _VECTOR)


def _define(operation, instruction):
    @infer_global(operation)
    class _(ConcreteTemplate):
        cases = (signature(lanes, lanes, lanes),)

    @lower_builtin(operation, lanes, lanes)
    def _(context, builder, sig, values):
        return getattr(builder, instruction)(*values, flags=_FUSED)


for _operation, _instruction in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul")):
    _define(_operation, _instruction)


def _pointer(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


@intrinsic
def pointer(typing_context, address):
    def build(context, builder, sig, values):
        return _pointer(builder, values[0], ir.IntType(8))

    return types.voidptr(types.int64), build


@numba.njit(inline="always", **COMMON)
def numbers(address, count):
    """``count`` float32 numbers as an array."""
    return carray(pointer(address), (count,), np.float32)


@numba.njit(inline="always", **COMMON)
def whole(d):
    """Bytes of a row of d numbers that make whole vectors; ``d % WIDTH`` numbers are behind them."""
    return d // WIDTH * BYTES


@intrinsic
def splat(typing_context, value):
    """A float32 in every place."""

    def build(context, builder, sig, values):
        single = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), values[0], ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(single, single, ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH))

    return lanes(types.float32), build


@intrinsic
def total(typing_context, vector):
    """The sum of all places, in a fixed order."""

    def build(context, builder, sig, values):
        kind = ir.FunctionType(_FLOAT, [_FLOAT, _VECTOR])
        reduce = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.fadd.v16f32")
        return builder.call(reduce, [ir.Constant(_FLOAT, -0.0), values[0]], fastmath=("reassoc",))

    return types.float32(lanes), build


@intrinsic
def load(typing_context, address):
    """The 16 numbers from ``address`` on."""

    def build(context, builder, sig, values):
        return builder.load(_pointer(builder, values[0], _VECTOR), align=4)

    return lanes(types.int64), build


@intrinsic
def store(typing_context, address, vector):
    """Write 16 numbers."""

    def build(context, builder, sig, values):
        builder.store(values[1], _pointer(builder, values[0], _VECTOR), align=4)
        return context.get_dummy_value()

    return types.none(types.int64, lanes), build


def _prefetch(for_writing):
    @intrinsic
    def prefetch(typing_context, address):
        def build(context, builder, sig, values):
            number = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), number, number, number])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
            options = (for_writing, 3, 1)  # into the nearest cache, of data
            builder.call(
                function,
                [_pointer(builder, values[0], ir.IntType(8)), *(ir.Constant(number, option) for option in options)],
            )
            return context.get_dummy_value()

        return types.none(types.int64), build

    return prefetch


# Bring the line at an address into the cache while other work goes on. No address is wrong.
prefetch, prefetch_to_write = _prefetch(0), _prefetch(1)


@intrinsic
def store_past(typing_context, address, vector):
    """Write 16 numbers to an address that is a multiple of 64, past the caches."""

    def build(context, builder, sig, values):
        instruction = builder.store(values[1], _pointer(builder, values[0], _VECTOR), align=64)
        one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        instruction.set_metadata("nontemporal", one)
        return context.get_dummy_value()

    return types.none(types.int64, lanes), build


@intrinsic
def load_rest(typing_context, address, count):
    """``count`` < 16 numbers from ``address`` on, and zeros behind them."""

    def build(context, builder, sig, values):
        room = cgutils.alloca_once(builder, _VECTOR)
        builder.store(ir.Constant(_VECTOR, [0.0] * WIDTH), room)
        _copy(builder, builder.bitcast(room, _FLOAT.as_pointer()), _pointer(builder, values[0], _FLOAT), values[1])
        return builder.load(room)

    return lanes(types.int64, types.int64), build


@intrinsic
def store_rest(typing_context, address, vector, count):
    """Write the first ``count`` < 16 numbers."""

    def build(context, builder, sig, values):
        room = cgutils.alloca_once(builder, _VECTOR)
        builder.store(values[1], room)
        _copy(builder, _pointer(builder, values[0], _FLOAT), builder.bitcast(room, _FLOAT.as_pointer()), values[2])
        return context.get_dummy_value()

    return types.none(types.int64, lanes, types.int64), build


def _copy(builder, target, source, count):
    with cgutils.for_range(builder, count) as loop:
        builder.store(
            builder.load(builder.gep(source, [loop.index]), align=4), builder.gep(target, [loop.index]), align=4
        )
