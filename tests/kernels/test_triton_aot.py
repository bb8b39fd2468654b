"""The Triton kernels compiled for A100 and H100 without a GPU: what must hold of the binaries for them to be fast.

Also what keeps them equal to the reference there: no fused multiply-add, nothing that flushes subnormal numbers.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from megatron_loco.kernels import triton_aot
from megatron_loco.kernels.triton_aot import (
    GRADS,
    Facts,
    Variant,
    all_variants,
    compile_variant,
    decode_variant,
    encode_variant,
    inspect,
    rest_variants,
)
from megatron_loco.kernels.triton_backend import load_kernels
from megatron_loco.kernels.triton_settings import ELEMENTS_PER_PROGRAM

CAPABILITIES = (80, 90)
GRADS_AND_BITS = [("bf16", 4), ("bf16", 8), ("fp32", 4), ("fp32", 8)]


def assert_budget(facts: Facts) -> None:
    assert facts.stack_bytes == facts.local_accesses == 0, "spilled"
    assert facts.registers <= 128  # 512 threads and more per multiprocessor
    assert facts.shared_bytes <= 8192  # a conversion between layouts of threads at most
    assert facts.fused == 0
    assert facts.flushing == 0


def elements_per_thread(variant: Variant) -> int:
    return ELEMENTS_PER_PROGRAM // (32 * int(variant.settings["num_warps"]))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("block_size", [256, 512, 2048])
@pytest.mark.parametrize(("grad", "bits"), GRADS_AND_BITS)
def test_encode_moves_128_bits_at_a_time(grad: str, bits: int, block_size: int, capability: int) -> None:
    variant = encode_variant(grad, block_size, bits, 8)
    facts = inspect(variant, capability)
    assert_budget(facts)
    elements = elements_per_thread(variant)
    # Gradients and error, and then codes and error, all of them in accesses of 16 bytes; the scale of the old error
    # and the two new ones in accesses of 4; statistics, 4 times 8 bytes.
    assert facts.loads[16] == elements * (GRADS[grad] + 1) // 16
    assert facts.stores == {16: elements * (bits + 8) // 8 // 16, 8: 4, 4: 2}
    assert set(facts.loads) == {16, 8, 4}
    assert facts.loads[8] + facts.loads[4] <= 7  # the table's numbers, the old scale


@pytest.mark.parametrize(("block_size", "capability"), [(256, 80), (256, 90), (2048, 90)])
@pytest.mark.parametrize(("output", "bits"), GRADS_AND_BITS)
def test_decode_loads_are_wide_and_stores_128_bits(output: str, bits: int, block_size: int, capability: int) -> None:
    variant = decode_variant(output, block_size, bits, divide=2)
    facts = inspect(variant, capability)
    assert_budget(facts)
    elements = elements_per_thread(variant)
    assert facts.stores == {16: elements * GRADS[output] // 16}
    # 16 codes of 4 bits are 8 bytes: with 16 bytes a thread would have 32 elements, whose output of bf16 leaves the
    # warp with gaps, or goes through shared memory. One load each for the first payload, the loop's four, and the
    # loop's rest; scales as many of 4 bytes.
    width = elements * bits // 8
    assert facts.loads[width] == 6 + (3 if width == 8 else 0)
    assert facts.loads[4] == 7


def test_packed_bf16_decode_needs_no_shared_memory() -> None:
    assert inspect(decode_variant("bf16", 256, 4), 90).shared_bytes == 0


@pytest.mark.parametrize(
    ("variant", "capability"),
    [
        (encode_variant("bf16", 128, 4, 8), 80),
        (encode_variant("bf16", 128, 4, 8), 90),
        (encode_variant("fp16", 256, 4, 16), 80),
        (encode_variant("bf16", 256, 4, 32), 90),
        (encode_variant("bf16", 256, 4, 0), 80),
        (encode_variant("bf16", 256, 4, 8, fixed=True), 90),
        (encode_variant("bf16", 96, 4, 8), 90),
        (encode_variant("bf16", 256, 2, 8), 80),
        (encode_variant("fp32", 256, 1, 16), 90),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_other_options_do_not_spill_either(variant: Variant, capability: int) -> None:
    facts = inspect(variant, capability)
    # An error in fp32 may take a few registers more: settings do not limit it, as some of its kernels would spill.
    assert facts.stack_bytes == facts.local_accesses == 0
    assert facts.registers <= 136
    assert facts.fused == facts.flushing == 0
    # 1 bit: 32 elements per thread are 4 of each of 8 groups, so that a thread's codes are 4 bytes.
    assert min(facts.loads) >= 4
    assert min(facts.stores) >= 4
    assert max(facts.loads) == 16


def test_unaligned_runs_still_move_codes_and_error_128_bits_at_a_time() -> None:
    # Rows of the error state and of the payload are aligned whatever the gradients are.
    variant = encode_variant("bf16", 256, 4, 8, unit=1)
    facts = inspect(variant, 90)
    assert facts.stack_bytes == facts.local_accesses == 0
    elements = elements_per_thread(variant)
    assert facts.loads[16] == elements // 16
    assert facts.loads[2] == elements  # gradients one by one: nothing is known of their addresses
    assert facts.stores == {16: elements * 12 // 8 // 16, 8: 4, 4: 2}


@pytest.mark.parametrize("variant", [*rest_variants("bf16"), *rest_variants("fp32")], ids=lambda variant: variant.name)
def test_rest_copies_128_bits_at_a_time(variant: Variant) -> None:
    facts = inspect(variant, 80)
    assert_budget(facts)
    itemsize = 4 if "fp32" in variant.name else 2
    copies = variant.settings["ITEM"] // 128 * itemsize // 16
    assert facts.stores[16] == copies  # zeros of any place are stored one by one
    assert facts.loads[16] >= copies


@pytest.mark.parametrize("variant", [encode_variant("bf16", 256, 4, 8), decode_variant("bf16", 256, 4, divide=2)])
def test_arithmetic_in_ptx_is_what_the_reference_does(variant: Variant) -> None:
    ptx = compile_variant(variant, 90).asm["ptx"]
    assert not re.search(r"\bfma\.|\bdiv\.(full|approx)|\brcp\.|\bex2\.", ptx)
    assert "div.rn.f32" in ptx
    # encode_blocks rounds sums of a number and a dither of at least 2^-17: 0, or at least 2^-41.
    assert {line.split()[0] for line in ptx.splitlines() if ".ftz" in line} <= {"cvt.rmi.ftz.f32.f32"}
    assert ("max.NaN.f32" in ptx) == variant.name.startswith("encode")  # amax keeps NaN


def test_both_kinds_of_kernels_live_in_one_process() -> None:
    interpreted, compiled = load_kernels(True), load_kernels(False)
    for name in ("encode_blocks", "encode_rest", "decode_blocks", "decode_rest"):
        assert type(getattr(interpreted, name)).__name__ == "InterpretedFunction"
        assert type(getattr(compiled, name)).__name__ == "JITFunction"
    assert "megatron_loco.kernels.triton_encode" not in sys.modules  # neither kind passes for the other


def test_variants_name_every_argument() -> None:
    kernels = load_kernels(False)
    for variant in all_variants():
        names = set(getattr(kernels, variant.kernel).arg_names)
        assert names <= set(variant.types) | set(variant.settings), variant.name
        assert set(variant.types) <= names, variant.name
    assert len({variant.name for variant in all_variants()}) == len(list(all_variants()))


def test_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    only = "^decode bf16 4-bit, block 256, sum$"
    program = [sys.executable, "-m", triton_aot.__name__, "--only", only, "--arch", "90", "--json", str(path)]
    result = subprocess.run(program, capture_output=True, text=True, env={"COLUMNS": "200"}, check=False)
    assert result.returncode == 0, result.stderr
    (facts,) = json.loads(path.read_text())
    assert facts["capability"] == 90
    assert facts["name"] == "decode bf16 4-bit, block 256, sum"
    for shown in (facts["name"], str(facts["registers"]), "2 x 128"):
        assert shown in result.stdout
