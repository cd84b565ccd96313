"""Kernels that begin before the one before has ended touch nothing of others until it has."""

from __future__ import annotations

import onnx
import sass
from product_code import machine_code_of

from benchmarks.gpu.build.models import in_half
from lowering.demo.decoder import DecoderConfig, build_decoder

MEMORY = {"LDG", "STG", "RED", "ATOM", "ATOMG", "LDGSTS", "UTMALDG", "UTMASTG", "UBLKCP", "LD", "ST"}
"""What reads or writes the device's memory."""
BEGIN, WAIT = "PREEXIT", "ACQBULK"  # griddepcontrol.launch_dependents and .wait


def decoder() -> onnx.ModelProto:
    """With rows of k that are whole chunks, so that few rows have a kernel of their own."""
    return in_half(build_decoder(DecoderConfig(1, 256, 4, 2, 64, 512, 256, 64)))


def before_the_wait(function: sass.Function) -> set[str]:
    """The opcodes that are in front of it; raises where a kernel has none or several."""
    opcodes = [instruction.opcode for instruction in function.instructions]
    assert opcodes.count(WAIT) == 1 or "matmul" in function.name, function.name
    return set(opcodes[: opcodes.index(WAIT)])


def test_kernels_wait_before_they_touch_memory() -> None:
    _, functions = machine_code_of(decoder(), "sm_90a")
    assert len(functions) > 10
    early = {}
    for function in functions:
        before = before_the_wait(function)
        assert BEGIN in before, function.name
        if before & MEMORY:
            early[function.name] = before & MEMORY
    # Weights, which no kernel writes, in the kernels for few rows: these are the first launches of products.
    assert early and all("matmul" in name for name in early)
    assert set().union(*early.values()) == {"LDGSTS"}


def test_before_hopper_kernels_follow_each_other() -> None:
    text = '<ir_version: 10, opset_import: ["" : 20]> m (float[n] x) => (float[n] y) { y = Exp (x) }'
    _, functions = machine_code_of(onnx.parser.parse_model(text), "sm_80")
    opcodes = {instruction.opcode for function in functions for instruction in function.instructions}
    assert opcodes and not opcodes & {BEGIN, WAIT}
