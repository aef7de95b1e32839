"""PyTorch's stable C interface (``torch/csrc/stable/c/shim.h``, PyTorch 2.10 and newer) for Numba's functions.

An operator whose kernel is such a function runs no line of Python. Between two matrix products a line of Python finds
its own code no longer in the caches, and a hundred of them cost a small model more than the rows do.

Tensors are handles, integers here. A kernel owns the handles that it is given, and gives away those that it returns.
"""

# mypy: ignore-errors
from __future__ import annotations

import ctypes

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from spheret.kernels import team
from spheret.kernels.lanes import pointer
from spheret.kernels.loop_angles import COMMON

WORD, NUMBER = types.int64, types.int32
BOXED = types.void(types.CPointer(WORD), types.uint64, types.uint64)  # (stack, inputs, outputs)
FLOAT32, FLOAT64, CPU = np.int32(6), np.int32(7), np.int32(0)
_VERSION = 2 << 56 | 10 << 48  # of the interface that is meant
_LIBRARY = team.libtorch()


def _function(name, *arguments):
    """A function of PyTorch's library that returns 0, or an error; AttributeError: this PyTorch has none of that
    name."""
    if _LIBRARY is None:
        raise AttributeError(f"no libtorch_cpu to look for {name} in")
    declare(name, ctypes.cast(getattr(_LIBRARY, name), ctypes.c_void_p).value)
    return types.ExternalFunction(name, NUMBER(*arguments))


def declare(name, address):
    """Make a C function known by its name, so that compiled code which calls it can be kept on disk."""
    llvmlite.binding.add_symbol(name, address)


_data_ptr = _function("aoti_torch_get_data_ptr", WORD, WORD)
_dtype = _function("aoti_torch_get_dtype", WORD, WORD)
_is_contiguous = _function("aoti_torch_is_contiguous", WORD, WORD)
_dim = _function("aoti_torch_get_dim", WORD, WORD)
_sizes = _function("aoti_torch_get_sizes", WORD, WORD)
_empty_strided = _function("aoti_torch_empty_strided", WORD, WORD, WORD, NUMBER, NUMBER, NUMBER, WORD)
_undefined = _function("aoti_torch_new_uninitialized_tensor", WORD)
_copy = _function("aoti_torch_copy_", WORD, WORD, NUMBER)
_delete = _function("aoti_torch_delete_tensor_object", WORD)
_threads = _function("torch_get_num_threads", WORD)
_function("torch_parallel_for", WORD, WORD, WORD, WORD, WORD)


@intrinsic
def frame(typing_context, words):
    """The address of ``words`` (a literal) integers that live until the calling function returns."""
    if not isinstance(words, types.IntegerLiteral):
        raise numba.errors.RequireLiteralValue("words must be a number in the source")
    size = words.literal_value

    def build(context, builder, sig, values):
        room = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(64), size))
        return builder.ptrtoint(room, ir.IntType(64))

    return WORD(words), build


def parallel(name):
    """A function ``(threads, arguments)`` for compiled code: the C function ``void name(int64_t *)`` is called once on
    each of PyTorch's threads, ``threads`` of them at most."""

    @intrinsic
    def run(typing_context, threads, arguments):
        def build(context, builder, sig, values):
            word, nothing = ir.IntType(64), ir.VoidType()
            task = cgutils.get_or_insert_function(builder.module, ir.FunctionType(nothing, [word]), name)
            # PyTorch's loop hands over a range, which the task does not want: its threads take rows themselves.
            chunk = ir.Function(builder.module, ir.FunctionType(nothing, [word] * 3), f"{name}_on_thread")
            chunk.linkage = "internal"
            inner = ir.IRBuilder(chunk.append_basic_block())
            inner.call(task, [chunk.args[2]])
            inner.ret_void()
            kind = ir.FunctionType(ir.IntType(32), [word] * 5)
            loop = cgutils.get_or_insert_function(builder.module, kind, "torch_parallel_for")
            zero, one = ir.Constant(word, 0), ir.Constant(word, 1)
            builder.call(loop, [zero, values[0], one, builder.ptrtoint(chunk, word), values[1]])
            return context.get_dummy_value()

        return types.none(WORD, WORD), build

    return run


@numba.njit(inline="always", **COMMON)
def _word(address):
    return carray(pointer(address), (1,), np.int64)[0]


@numba.njit(**COMMON)
def data_ptr(tensor, room):
    """The address of a tensor's numbers; ``room`` is that of a word to write into, here and below."""
    _data_ptr(tensor, room)
    return _word(room)


@numba.njit(**COMMON)
def number(tensor, room):
    """The first number of a tensor of float32 or float64."""
    _dtype(tensor, room)
    kind, at = carray(pointer(room), (1,), np.int32)[0], data_ptr(tensor, room)
    if kind == FLOAT64:
        return carray(pointer(at), (1,), np.float64)[0]
    return np.float64(carray(pointer(at), (1,), np.float32)[0])


@numba.njit(**COMMON)
def is_scalar(tensor, room):
    """Whether :func:`number` can read it."""
    _dtype(tensor, room)
    kind = carray(pointer(room), (1,), np.int32)[0]
    _, _, d, n = shape(tensor, room)
    return kind in (FLOAT32, FLOAT64) and d * n == 1


@numba.njit(**COMMON)
def shape(tensor, room):
    """Dimensions, the address of their sizes, which the tensor owns, the last size, and the product of the others."""
    _dim(tensor, room)
    count = _word(room)
    if count == 0:
        return 0, 0, 1, 1
    _sizes(tensor, room)
    address, rows = _word(room), 1
    sizes = carray(pointer(address), (count,), np.int64)
    for k in range(count - 1):
        rows *= sizes[k]
    return count, address, sizes[count - 1], rows


@numba.njit(**COMMON)
def empty(count, sizes, room):
    """A new float32 tensor with ``count`` dimensions of the sizes at the address; 0 where there is no memory."""
    extents, strides, step = carray(pointer(sizes), (count,), np.int64), np.empty(count + 1, np.int64), 1
    for k in range(count - 1, -1, -1):
        strides[k] = step
        step *= max(extents[k], 1)
    failed = _empty_strided(count, sizes, strides.ctypes.data, FLOAT32, CPU, CPU, room)
    strides[count] = failed  # so that the array lives as long as its address is in use
    return 0 if failed != 0 else _word(room)


@numba.njit(**COMMON)
def plain(tensor, room):
    """The tensor itself, or its copy in contiguous float32 in its place; 0 where there is no memory."""
    _dtype(tensor, room)
    kind = carray(pointer(room), (1,), np.int32)[0]
    _is_contiguous(tensor, room)
    if kind == FLOAT32 and carray(pointer(room), (1,), np.uint8)[0] != 0:
        return tensor
    count, sizes, _, _ = shape(tensor, room)
    copy = empty(count, sizes, room)
    if copy != 0:
        _copy(copy, tensor, NUMBER(0))
    _delete(tensor)
    return copy


@numba.njit(**COMMON)
def threads(room):
    """PyTorch's number of threads."""
    _threads(room)
    return np.int64(carray(pointer(room), (1,), np.uint32)[0])


@numba.njit(**COMMON)
def free(tensor):
    """Give a handle back, unless it is 0."""
    if tensor != 0:
        _delete(tensor)


@numba.njit(**COMMON)
def returned(tensor, room):
    """A handle as an operator returns it: in place of 0 an undefined tensor, which is None in Python."""
    if tensor != 0:
        return tensor
    _undefined(room)
    return _word(room)


class Implementation:
    """C functions as the CPU kernels of operators of one namespace, until :meth:`withdraw`."""

    def __init__(self, namespace, functions):
        """``functions``: addresses of functions of the type ``BOXED`` by the names of operators."""
        self._handle = ctypes.c_void_p()
        create, implement = _LIBRARY.aoti_torch_library_init_impl, _LIBRARY.torch_library_impl
        text = ctypes.c_char_p
        create.argtypes = [text, text, text, ctypes.c_uint32, ctypes.POINTER(ctypes.c_void_p)]
        implement.argtypes = [ctypes.c_void_p, text, ctypes.c_void_p, ctypes.c_uint64]
        failed = create(namespace.encode(), b"CPU", __file__.encode(), 0, ctypes.byref(self._handle))
        for name, address in functions.items():
            failed = failed or implement(self._handle, name.encode(), address, _VERSION)
        if failed:
            raise RuntimeError(f"PyTorch refuses C kernels for {', '.join(functions)}")

    def withdraw(self):
        """Take the kernels out of PyTorch's tables."""
        _LIBRARY.aoti_torch_delete_library_object(self._handle)
