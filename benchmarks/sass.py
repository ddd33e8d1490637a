"""A Triton kernel as machine code for a GPU that is not here: compiled, disassembled, counted."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

_TABLE = {"table": "*i64", "owners": "*i32", "call": "*i64", "flags": "*i8"}
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
        found = re.search(r"(?:BRA|CALL\S*)\s.*?(0x[0-9a-f]+)", self.text)
        return int(found[1], 16) if found else None


@dataclass
class MachineCode:
    """What a kernel became.

    Attributes:
        executed: instructions that a thread issues on the common way: no slow path of a division, no
            exit before the end, loops once, every block behind a condition.
        spilled: bytes of stack.
        shared: bytes of shared memory.
    """

    executed: list[Instruction]
    registers: int
    spilled: int
    shared: int
    ptx: str = field(repr=False)

    def count(self, operation: str) -> int:
        """Executed instructions whose operation begins so."""
        return sum(one.operation.startswith(operation) for one in self.executed)

    def widths(self, operation: str) -> Counter[int]:
        """Bytes of each LDG or STG, with their number."""
        found: Counter[int] = Counter()
        for one in self.executed:
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
    **options: Any,
) -> MachineCode:
    """Compile for a compute capability (90 is Hopper) with the Triton that is installed.

    Args:
        types: of the arguments that are no constants; default those of a table's kernels. Pointers
            are taken to be aligned.
    """
    types = types or _TABLE
    position = {argument: i for i, argument in enumerate(kernel.arg_names)}
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(
        fn=kernel,
        signature={name: signature[name] for name in kernel.arg_names},
        constexprs={(position[name],): value for name, value in constants.items()},
        attrs={
            (position[name],): [["tt.divisibility", 16]]
            for name, kind in types.items()
            if kind.startswith("*")
        },
    )
    compiled = compile_source(source, target=GPUTarget("cuda", capability, 32), options=options)
    cubin = compiled.asm["cubin"]
    resources = _cuobjdump("-res-usage", cubin)
    registers = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", resources)
    assert registers is not None, resources
    count, spilled, shared = map(int, registers.groups())
    executed = _executed(_instructions(_cuobjdump("-sass", cubin)))
    return MachineCode(executed, count, spilled, shared, compiled.asm["ptx"])


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
