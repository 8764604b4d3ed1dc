"""Three operations on a block of rows, written as vector instructions.

LLVM vectorises the plain loops too, but with a width that leaves a third of a typical row to
scalar code. Here a row is a whole number of 64-byte vectors (the table is padded to that), every
row of the block has its own vector accumulator, and each number is read once.

Numba's disk cache looks at the file of the kernel alone: after a change here, touch kernels.py.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

instruction: Any = intrinsic  # numba passes the first argument of each function below

BLOCK = 16  # rows in flight: their accumulators fit the registers of a wide machine
LINE = 64  # bytes in a vector, and in a cache line


class _Block:
    """The rows `row[0..BLOCK)` of table x, and a loop over their columns, a vector at a time."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        x, row = (context.make_array(signature.args[i])(context, builder, args[i]) for i in (0, 1))
        self.builder, number = builder, context.get_data_type(signature.args[0].dtype)
        size = context.get_abi_sizeof(number)
        self.lanes, self.number = LINE // size, number
        self.vector = ir.VectorType(number, self.lanes)
        self.row_bytes = builder.extract_value(x.strides, 0)
        wide = self.row_bytes.type
        self.rows = []
        for q in range(BLOCK):
            index = builder.load(cgutils.gep(builder, row.data, q))
            offset = builder.mul(builder.sext(index, wide), self.row_bytes)
            self.rows.append(cgutils.pointer_add(builder, x.data, offset))

    def each_vector(self, body: Callable[[Any], None]) -> None:
        """`body` gets the byte offset of one vector of columns after the other."""
        zero, step = self.row_bytes.type(0), self.row_bytes.type(LINE)
        with cgutils.for_range_slice(self.builder, zero, self.row_bytes, step) as (offset, _):
            body(offset)

    def load(self, start: Any, offset: Any) -> Any:
        return self.builder.load(self._at(start, offset), align=4)

    def store(self, value: Any, start: Any, offset: Any) -> None:
        self.builder.store(value, self._at(start, offset), align=4)

    def call(self, name: str, *args: Any) -> Any:
        """An LLVM intrinsic on vectors, e.g. fma."""
        bits = f"v{self.lanes}f{32 if self.lanes == 16 else 64}"
        result = self.number if name.startswith("vector.reduce") else self.vector
        kind = ir.FunctionType(result, [a.type for a in args])
        function = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.{name}.{bits}")
        return self.builder.call(function, args, fastmath=("fast",))

    def splat(self, value: Any) -> Any:
        one = self.builder.insert_element(
            ir.Constant(self.vector, ir.Undefined), value, ir.IntType(32)(0)
        )
        mask = ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(one, one, mask)

    def _at(self, start: Any, offset: Any) -> Any:
        place = cgutils.pointer_add(self.builder, start, offset)
        return self.builder.bitcast(place, self.vector.as_pointer())


@instruction
def dot_rows(typing_context, x, row, w, z):
    """z[q] = X[row[q]] w for the block."""

    def codegen(context, builder, signature, args):
        block = _Block(context, builder, signature, args)
        w, z = (
            context.make_array(signature.args[i])(context, builder, args[i]).data for i in (2, 3)
        )
        sums = [
            cgutils.alloca_once_value(builder, ir.Constant(block.vector, None)) for _ in block.rows
        ]

        def body(offset):
            weights = block.load(w, offset)
            for start, total in zip(block.rows, sums, strict=True):
                product = block.call("fma", block.load(start, offset), weights, builder.load(total))
                builder.store(product, total)

        block.each_vector(body)
        for q, total in enumerate(sums):
            added = block.call("vector.reduce.fadd", block.number(0.0), builder.load(total))
            builder.store(added, cgutils.gep(builder, z, q))
        return context.get_dummy_value()

    return types.void(x, row, w, z), codegen


@instruction
def add_rows(typing_context, x, row, e, g):
    """g += X[row]' e for the block."""

    def codegen(context, builder, signature, args):
        block = _Block(context, builder, signature, args)
        e, g = (
            context.make_array(signature.args[i])(context, builder, args[i]).data for i in (2, 3)
        )
        factors = [block.splat(builder.load(cgutils.gep(builder, e, q))) for q in range(BLOCK)]

        def body(offset):
            total = block.load(g, offset)
            for start, factor in zip(block.rows, factors, strict=True):
                total = block.call("fma", block.load(start, offset), factor, total)
            block.store(total, g, offset)

        block.each_vector(body)
        return context.get_dummy_value()

    return types.void(x, row, e, g), codegen


@instruction
def prefetch_row(typing_context, x, row):
    """Ask for all cache lines of a row; rows come in random order, and waiting costs most."""

    def codegen(context, builder, signature, args):
        x = context.make_array(signature.args[0])(context, builder, args[0])
        row_bytes, word = builder.extract_value(x.strides, 0), ir.IntType(32)
        start = cgutils.pointer_add(
            builder, x.data, builder.mul(builder.sext(args[1], row_bytes.type), row_bytes)
        )
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        zero, step = row_bytes.type(0), row_bytes.type(LINE)
        with cgutils.for_range_slice(builder, zero, row_bytes, step) as (offset, _):
            line = builder.bitcast(cgutils.pointer_add(builder, start, offset), cgutils.voidptr_t)
            builder.call(call, [line, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(x, row), codegen


@instruction
def as_float(typing_context, bits):
    """The float32 that these 32 bits are."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.int32), codegen
