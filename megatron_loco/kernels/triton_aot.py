"""Compile the Triton kernels ahead of time, without a GPU, and read what became of them.

``python -m megatron_loco.kernels.triton_aot`` prints a table of kernels: registers, spills, shared memory, and how wide
global memory is read and written. From the binaries, by the tools inside Triton's wheel; it proves nothing about speed.

What decides the speed shows here all the same: a kernel that spills, or that moves bytes one by one (which is what
Triton makes of a tensor that it cannot prove to be aligned), is slow on every device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_loco.kernels.triton_backend import load_kernels
from megatron_loco.kernels.triton_settings import (
    decode_rest_settings,
    decode_settings,
    encode_rest_settings,
    encode_settings,
)

CAPABILITIES = (80, 90)
"""A100; H100 and H200."""
GRADS = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Triton's names of the dtypes of gradients, and bytes per element."""
BITS = (4, 8, 2, 1)
ERROR_TYPES = {0: None, 8: "*i8", 16: "*i16", 32: "*fp32"}
BLOCK_SIZES = (32, 96, 128, 256, 512, 1024, 2048, 4096)
UNITS = (16, 1)
"""Aligned, and with runs at any element."""

_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)


@dataclass(frozen=True)
class Variant:
    """A kernel as the backend compiles it.

    Attributes:
        name: For the table.
        kernel: Name of the function.
        types: Triton's types of the arguments; None for an absent tensor, which is a constant.
        settings: Compile-time arguments and options.
    """

    name: str
    kernel: str
    types: dict[str, str | None]
    settings: dict[str, Any]


@dataclass(frozen=True)
class Facts:
    """What a compiled kernel needs.

    Attributes:
        name: Of the variant.
        capability: Compute capability, 80 for 8.0.
        registers: Per thread.
        stack_bytes: Per thread: spilled registers and arrays.
        local_accesses: Instructions that access memory of the thread alone: what was spilled.
        shared_bytes: Per program.
        instructions: Of the whole kernel.
        loads: Bytes per thread of a load from global memory -> number of such instructions.
        stores: The same of stores.
        fused: ``fma`` in PTX (a division's own are made later).
        flushing: Lines of PTX that flush subnormal numbers, but for roundings to integers.
    """

    name: str
    capability: int
    registers: int
    stack_bytes: int
    local_accesses: int
    shared_bytes: int
    instructions: int
    loads: dict[int, int]
    stores: dict[int, int]
    fused: int
    flushing: int


def encode_variant(
    grad: str, block_size: int, bits: int, error_bits: int, *, fixed: bool = False, unit: int = 16
) -> Variant:
    """``encode_blocks`` for gradients of type ``grad``."""
    types = {
        "grad_ptr": f"*{grad}",
        "error_ptr": ERROR_TYPES[error_bits],
        "error_scale_ptr": "*fp32" if error_bits in (8, 16) else None,
        "send_ptr": "*u8",
        "fixed_scale_ptr": "*fp32" if fixed else None,
        "programs_ptr": "*i64",
        "partial_ptr": "*fp64",
        "step_hash": "i32",
        "beta": "fp32",
        "one_minus_beta": "fp32",
        "reset": "i32",
    }
    name = f"encode {grad} {bits}-bit, error {error_bits}, block {block_size}{', fixed' * fixed}{_unaligned(unit)}"
    return Variant(name, "encode_blocks", types, encode_settings(block_size, bits, error_bits, fixed, unit))


def decode_variant(output: str, block_size: int, bits: int, *, divide: int = 0, unit: int = 16) -> Variant:
    """``decode_blocks`` for outputs of type ``output``."""
    types: dict[str, str | None] = {
        "recv_ptr": "*u8",
        "output_ptr": f"*{output}",
        "programs_ptr": "*i64",
        **_SUM_TYPES,
    }
    name = f"decode {output} {bits}-bit, block {block_size}, {_DIVISIONS[divide]}{_unaligned(unit)}"
    return Variant(name, "decode_blocks", types, decode_settings(block_size, bits, unit, divide))


def rest_variants(grad: str, unit: int = 16) -> Iterator[Variant]:
    """``encode_rest`` and ``decode_rest``."""
    tables: dict[str, str | None] = {"exact_ptr": "*i64", "num_exact": "i32"}
    encode: dict[str, str | None] = {
        "grad_ptr": f"*{grad}",
        "send_ptr": "*u8",
        "gaps_ptr": "*i64",
        "partial_ptr": "*fp64",
        "statistics_ptr": "*fp64",
        "num_gaps": "i32",
        "num_partials": "i32",
    }
    yield Variant(f"encode rest {grad}{_unaligned(unit)}", "encode_rest", tables | encode, encode_rest_settings(unit))
    decode: dict[str, str | None] = {"recv_ptr": "*u8", "output_ptr": f"*{grad}", "zeros_ptr": "*i64", **_SUM_TYPES}
    for divide, what in enumerate(_DIVISIONS):
        name = f"decode rest {grad}, {what}{_unaligned(unit)}"
        yield Variant(name, "decode_rest", tables | decode, decode_rest_settings(unit, divide))


def all_variants() -> Iterator[Variant]:
    """Every option with every other that it meets in the code; settings that only pick a constant, once."""
    for grad, block_size, bits, error_bits in itertools.product(GRADS, BLOCK_SIZES, BITS, ERROR_TYPES):
        if grad == "fp16" and block_size != 256:
            continue  # the same code as bf16 but for one conversion
        yield encode_variant(grad, block_size, bits, error_bits)
        if block_size == 256:
            yield encode_variant(grad, block_size, bits, error_bits, fixed=True)
            yield encode_variant(grad, block_size, bits, error_bits, unit=1)
    for output, block_size, bits in itertools.product(GRADS, BLOCK_SIZES, BITS):
        yield decode_variant(output, block_size, bits)
        if block_size == 256:
            yield decode_variant(output, block_size, bits, divide=1)
            yield decode_variant(output, block_size, bits, divide=2)
            yield decode_variant(output, block_size, bits, unit=1)
    for grad, unit in itertools.product(GRADS, UNITS):
        yield from rest_variants(grad, unit)


def compile_variant(variant: Variant, capability: int) -> Any:
    """Compile for a compute capability as the backend's launches do; returns Triton's compiled kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(load_kernels(False), variant.kernel)
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(function.arg_names):
        kind = variant.types.get(name)
        if kind is None:
            signature[name] = "constexpr"
            constants[index,] = variant.settings.get(name)
            continue
        signature[name] = kind
        if kind.startswith("*"):  # torch's allocations start at multiples of 512 bytes
            attributes[index,] = [["tt.divisibility", 16]]
    options = {name: value for name, value in variant.settings.items() if name not in signature}
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def inspect(variant: Variant, capability: int) -> Facts:
    """Compile a variant and read its binary."""
    compiled = compile_variant(variant, capability)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", str(binary))
        assembly = _tool("nvdisasm", "-c", str(binary))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {usage}")
    instructions = _INSTRUCTION.findall(assembly)
    ptx = compiled.asm["ptx"]
    return Facts(
        name=variant.name,
        capability=capability,
        registers=int(found[1]),
        stack_bytes=int(found[2]),
        local_accesses=sum(name.split(".")[0] in ("LDL", "STL") for name in instructions),
        shared_bytes=compiled.metadata.shared,
        instructions=len(instructions),
        loads=_widths(instructions, "LDG"),
        stores=_widths(instructions, "STG"),
        fused=len(re.findall(r"\bfma\.", ptx)),
        # A rounding to an integer gives 0 for a subnormal number, flushed or not, if it is not negative; encode_blocks
        # rounds the sum of a number and a dither of at least 2^-17, which is 0 or at least 2^-41.
        flushing=sum(".ftz" in line and "cvt.rmi." not in line for line in ptx.splitlines()),
    )


def _tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    result = subprocess.run([path, *arguments], capture_output=True, text=True, check=True)
    return result.stdout + result.stderr


def _widths(instructions: Iterable[str], opcode: str) -> dict[int, int]:
    counts: Counter[int] = Counter()
    for name in instructions:
        first, *modifiers = name.split(".")
        if first == opcode:
            counts[next((_WIDTHS[modifier] for modifier in modifiers if modifier in _WIDTHS), 4)] += 1
    return dict(sorted(counts.items(), reverse=True))


def _unaligned(unit: int) -> str:
    return "" if unit == UNITS[0] else f", unit {unit}"


_DIVISIONS = ("sum", "power of two", "division")
_SUM_TYPES = {"world_size": "i32", "payload_units": "i32", "factor": "fp32"}


def main() -> None:
    """Compile, print the table, and with ``--json`` write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="Regular expression of names; default: all (about 15 minutes).")
    parser.add_argument("--arch", type=int, nargs="+", default=CAPABILITIES, help="Compute capabilities, as 80 90.")
    parser.add_argument("--json", type=Path, help="Write the facts to this file.")
    arguments = parser.parse_args()
    chosen = [variant for variant in all_variants() if re.search(arguments.only, variant.name)]
    facts = [inspect(variant, capability) for variant in chosen for capability in arguments.arch]
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(each) for each in facts], indent=1))
    table = Table("kernel", "sm", "registers", "spilled", "shared bytes", "instructions", "loads", "stores")
    for each in facts:
        table.add_row(
            each.name,
            str(each.capability),
            str(each.registers),
            f"{each.stack_bytes} B" if each.stack_bytes or each.local_accesses else "0",
            str(each.shared_bytes),
            str(each.instructions),
            _bits(each.loads),
            _bits(each.stores),
        )
    console = Console()
    console.print(table)
    console.print("loads, stores: number of instructions x bits per thread, from and to global memory")


def _bits(widths: dict[int, int]) -> str:
    return ", ".join(f"{count} x {8 * width}" for width, count in widths.items())


if __name__ == "__main__":
    main()
