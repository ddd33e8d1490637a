"""The GPU kernels without a GPU: compiled for sm_90 and sm_100, read as machine code, counted.

    python benchmarks/bench_sass.py [--json FILE]
    python benchmarks/bench_sass.py --guard      # for CI: sm_90 alone, and what has a limit

Per kernel: instructions a thread issues for each element of its own, registers, spills, bytes of
each load and store. The last column is a model, not a measurement: on an H200 (132 multiprocessors
at 1.98 GHz with 4 issue slots each, 4.3 TB/s in a device copy) a tile takes the longest of its time
in memory, its issue slots, and its own latency shared by the programs that fit at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import measured
import typer
from rich.console import Console
from rich.table import Table
from sass import MachineCode, compile_kernel

from sglang_fp8rl.numerics.triton import cast_kernels, copy_kernels
from sglang_fp8rl.numerics.triton.hardware import row_warps, tile_options

BF16, FP32 = 1, 0
# What a guard allows, per element: the limits that the design was made for.
MAX_INSTRUCTIONS = {BF16: 10.0, FP32: 12.0}
MAX_REGISTERS = 64
# The model's machine.
SLOTS, BYTES_PER_CYCLE = 4, 4.3e12 / 132 / 1.98e9
REGISTERS, MAX_THREADS = 65536, 2048
LATENCY = 4 * 700  # cycles: three numbers from the table one after the other, then the tile


@dataclass(frozen=True)
class Case:
    """One kernel with its constants.

    Attributes:
        elements: of a program.
        bytes: moved per element, source and destination.
        limit: instructions per element; None: only shown.
    """

    name: str
    kernel: Any
    constants: dict[str, Any]
    options: dict[str, Any]
    elements: int
    bytes: int
    limit: float | None = None


def cases() -> list[Case]:
    found = []
    for kind, label in ((BF16, "BF16"), (FP32, "FP32")):
        size, rounding = (2, 4)[kind == FP32], {"POW2": False, "ROUND": True, "PACKED": True}
        for ragged, source_align, align, limit in (
            (False, 16, 16, MAX_INSTRUCTIONS[kind]),
            (True, 16, 16, MAX_INSTRUCTIONS[kind]),
            (True, 8, 8, 12.0),
            (True, 4, 4, None),
            (True, size, 1, None),
        ):
            constants = {"RAGGED": ragged, "SOURCE_ALIGN": source_align, "TARGET_ALIGN": align}
            constants |= {"KIND": kind, **rounding}
            name = f"tile {label}{' ragged' if ragged else ''}, {source_align} → {align} bytes"
            options = tile_options(align)
            found.append(
                Case(
                    name, cast_kernels.table_tile_kernel, constants, options, 16384, size + 1, limit
                )
            )
        aligned = {"SOURCE_ALIGN": 16, "TARGET_ALIGN": 16, "ONE_CHUNK": True}
        for chunk in (2048, 8192, 16384):
            constants = {**aligned, "CHUNK": chunk, "KIND": kind, **rounding}
            options = {"num_warps": row_warps(chunk)}
            name = f"channel {label}, {chunk} columns"
            found.append(
                Case(name, cast_kernels.table_row_kernel, constants, options, chunk, size + 1, 13.0)
            )
        constants = {
            **aligned,
            "CHUNK": 4096,
            "KIND": kind,
            "TO_FP32": False,
            "SCALES": False,
            "PACKED": True,
        }
        options = {"num_warps": row_warps(4096)}
        found.append(
            Case(f"copy {label} → BF16, 4096 columns", copy_kernels.table_copy_kernel, constants, options,
                 4096, size + 2)
        )  # fmt: skip
    constants = {**aligned, "CHUNK": 4096}
    found.append(
        Case("codes, 4096 columns", copy_kernels.table_codes_kernel, constants, options, 4096, 2)
    )
    return found


def share_of_copy(case: Case, code: MachineCode) -> float:
    """The model of this module's docstring."""
    warps = case.options["num_warps"]
    memory = case.elements * case.bytes / BYTES_PER_CYCLE
    issue = len(code.executed) * warps / SLOTS
    at_once = min(
        REGISTERS // (-(-code.registers // 8) * 8 * 32 * warps), MAX_THREADS // 32 // warps
    )
    return memory / max(memory, issue, (LATENCY + issue) / max(1, min(at_once, 32)))


def wide(code: MachineCode, operation: str) -> str:
    """`16 B × 8`, for accesses other than the table's own numbers."""
    return ", ".join(f"{size} B × {n}" for size, n in sorted(code.widths(operation).items()))


def row_of(case: Case, capability: int) -> dict[str, Any]:
    code = compile_kernel(case.kernel, case.constants, capability, **case.options)
    per_thread = case.elements / (32 * case.options["num_warps"])
    return {
        "benchmark": "sass",
        "case": case.name,
        "sm": capability,
        "instructions_per_element": round(len(code.executed) / per_thread, 2),
        "limit": case.limit,
        "registers": code.registers,
        "spilled_bytes": code.spilled,
        "loads": wide(code, "LDG"),
        "stores": wide(code, "STG"),
        "modelled_share_of_copy": round(share_of_copy(case, code), 2) if capability == 90 else None,
        "triton": metadata.version("triton"),
    }


def main(
    guard: Annotated[
        bool, typer.Option("--guard", help="sm_90 alone, and only what has a limit")
    ] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="append JSON lines")] = None,
) -> None:
    """Count what the GPU kernels execute; exit 1 above a limit."""
    wanted = [case for case in cases() if case.limit is not None or not guard]
    rows = [row_of(case, sm) for sm in ((90,) if guard else (90, 100)) for case in wanted]
    table = Table(title=f"compiled by Triton {metadata.version('triton')}; no GPU")
    for column in ("sm", "kernel", "instructions per element", "limit", "registers", "spilled",
                   "loads", "stores", "of copy (model)"):  # fmt: skip
        table.add_column(column)
    for row in rows:
        shown = list(row.values())[1:-1]
        shown[0], shown[1] = shown[1], shown[0]
        table.add_row(*("" if cell is None else str(cell) for cell in shown))
    console = Console()
    console.width = max(console.width, 160)
    console.print(table)
    measured.append(json_path, rows)
    missed = [
        row["case"]
        for row in rows
        if row["limit"]
        and (
            row["instructions_per_element"] > row["limit"]
            or row["registers"] > MAX_REGISTERS
            or row["spilled_bytes"] > 16
        )
    ]
    if missed:
        console.print(f"[red]above the limits: {', '.join(missed)}[/red]")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
