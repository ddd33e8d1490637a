"""A Triton kernel as machine code for a GPU that is not here: compiled, disassembled, counted."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

_TABLE = {"table": "*i64", "owners": "*i32", "call": "*i64", "flags": "*i8"}
# Of one matrix: addresses are wide, and sizes and strides fit 32 bits.
_ADDRESSES = ("source", "target", "scales", "flags")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)
_PREDICATE = re.compile(r"^@!?U?P(?:\d+|T)\s+")


@dataclass(frozen=True)
class Instruction:
    """One line of SASS. `predicated` ones may do nothing, but are issued all the same."""

    address: int
    operation: str
    text: str
    predicated: bool

    @property
    def target(self) -> int | None:
        """Where a branch goes."""
        found = re.search(r"(?:BRA|CALL)\S*\s.*?(0x[0-9a-f]+)", self.text)
        return int(found[1], 16) if found else None


@dataclass
class MachineCode:
    """What a kernel became.

    Attributes:
        executed: instructions that a thread issues on the common way: no slow path of a division, no
            exit before the end, loops once, every block behind a condition.
        loop: of these, those between the longest way back and its target, if a tensor core is among them.
        spilled: bytes of stack.
        shared: bytes of shared memory.
    """

    executed: list[Instruction]
    loop: list[Instruction]
    registers: int
    spilled: int
    shared: int
    ptx: str = field(repr=False)

    def count(self, operation: str, *, in_loop: bool = False) -> int:
        """Executed instructions whose operation begins so."""
        where = self.loop if in_loop else self.executed
        return sum(one.operation.startswith(operation) for one in where)

    def widths(self, operation: str, *, in_loop: bool = False) -> Counter[int]:
        """Bytes of each LDG, LDGSTS or STG, with their number."""
        found: Counter[int] = Counter()
        for one in self.loop if in_loop else self.executed:
            if one.operation.startswith(operation):
                bits = next((b for b in (256, 128, 64, 16, 8) if f"{b}" in one.operation.split(".")
                             or f"U{b}" in one.operation.split(".")), 32)  # fmt: skip
                found[bits // 8] += 1
        return found


def compile_kernel(
    kernel: Any,
    constants: dict[str, Any],
    capability: int = 90,
    types: dict[str, str] | None = None,
    divisible: Collection[str] = (),
    **options: Any,
) -> MachineCode:
    """Compile for a compute capability (90 is Hopper) with the Triton that is installed.

    Args:
        types: of the arguments that are no constants; default those of a table's kernels, or of one
            matrix's. Pointers are taken to be aligned.
        divisible: integers among them that 16 divides.
    """
    types = types or _types_of(kernel, constants)
    position = {argument: i for i, argument in enumerate(kernel.arg_names)}
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(
        fn=kernel,
        signature={name: signature[name] for name in kernel.arg_names},
        constexprs={(position[name],): value for name, value in constants.items()},
        attrs={
            (position[name],): [["tt.divisibility", 16]]
            for name, kind in types.items()
            if kind.startswith("*") or name in divisible
        },
    )
    compiled = compile_source(source, target=GPUTarget("cuda", capability, 32), options=options)
    cubin = compiled.asm["cubin"]
    resources = _cuobjdump("-res-usage", cubin)
    registers = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", resources)
    assert registers is not None, resources
    count, spilled, shared = map(int, registers.groups())
    instructions = _instructions(_cuobjdump("-sass", cubin))
    shared = max(shared, compiled.metadata.shared)  # what a launch adds is not in the cubin
    ptx = compiled.asm["ptx"]
    return MachineCode(_executed(instructions), _loop(instructions), count, spilled, shared, ptx)


def _types_of(kernel: Any, constants: Collection[str]) -> dict[str, str]:
    if "table" in kernel.arg_names:
        return _TABLE
    rest = [name for name in kernel.arg_names if name not in constants]
    return {name: "i64" if name in _ADDRESSES else "i32" for name in rest}


def _cuobjdump(option: str, cubin: bytes) -> str:
    """The one that Triton brings along."""
    import tempfile

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([program, option, file.name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def _instructions(sass: str) -> list[Instruction]:
    found = []
    for address, text in _INSTRUCTION.findall(sass):
        bare = _PREDICATE.sub("", text)
        found.append(Instruction(int(address, 16), bare.split()[0], text, bare != text))
    return found


def _executed(instructions: list[Instruction]) -> list[Instruction]:
    """The common way through, see `MachineCode.executed`."""
    at = {one.address: i for i, one in enumerate(instructions)}
    done: list[Instruction] = []
    i = 0
    while i < len(instructions):
        one = instructions[i]
        done.append(one)
        i += 1
        if one.operation == "EXIT" and not one.predicated:
            break
        target = at.get(one.target or -1)
        if one.operation.startswith("BRA") and target is not None and target > i:
            skipped = instructions[i:target]
            calls = any(inner.operation.startswith("CALL") for inner in skipped)
            # A condition is taken to hold where it skips nothing but a slow path.
            if not one.predicated or calls:
                i = target
    return done


def _loop(instructions: list[Instruction]) -> list[Instruction]:
    at = {one.address: i for i, one in enumerate(instructions)}
    found: list[Instruction] = []
    for i, one in enumerate(instructions):
        target = at.get(one.target or -1, i) if one.operation.startswith("BRA") else i
        body = instructions[target : i + 1]
        if len(body) > len(found) and any("MMA" in inner.operation for inner in body):
            found = body
    return found
