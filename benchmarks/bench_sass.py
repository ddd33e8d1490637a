"""The GPU kernels without a GPU: compiled for sm_90 and sm_100, read as machine code, counted.

    python benchmarks/bench_sass.py [--json FILE]
    python benchmarks/bench_sass.py --guard      # for CI: sm_90 alone, and what has a limit

Per kernel: instructions a thread issues for each element of its own, registers, spills, bytes of
each load and store. The last column is a model, not a measurement: on an H200 (132 multiprocessors
at 1.98 GHz with 4 issue slots each, 4.3 TB/s in a device copy) a tile takes the longest of its time
in memory, its issue slots, and its own latency shared by the programs that fit at once.

The second table is of the product with stored codes, by the same model: the share of the time that the codes
alone would take in memory. A layer takes the longest of that; of the busiest multiprocessor's issue slots; of
codes and tokens on their way out of the cache (5,120 bytes a cycle, NVIDIA's number for an A100: there is none for
later GPUs); and of its programs' latency, where their loads ahead don't hide it. What a launch takes is not in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import measured
import torch
import typer
from linear_code import DOUBLED_LIMIT, HOPPER_SHARED, MULTIPROCESSORS, compiled, tile_for
from rich.console import Console
from rich.table import Table
from sass import MachineCode, compile_kernel

from sglang_fp8rl.numerics.triton.fingerprint import HEIGHT, LANES, WARPS, numbers_kernel
from sglang_fp8rl.numerics.triton.kernels import (
    matrix_cast_kernel,
    matrix_copy_kernel,
    table_cast_kernel,
    table_codes_kernel,
    table_copy_kernel,
)
from sglang_fp8rl.numerics.triton.linear import doubled_kernel, doubled_tile
from sglang_fp8rl.numerics.triton.matrix import cast_options, constants_of, row_warps
from sglang_fp8rl.numerics.write_table import BF16, FP16, FP32

# What a guard allows, per element: the limits that the design was made for.
MAX_INSTRUCTIONS = {BF16: 10.0, FP16: 12.0, FP32: 12.0}
MAX_REGISTERS = 64
MAX_SPILLED = {90: 0, 100: 16}  # bytes
# The model's machine.
SLOTS, BYTES_PER_CYCLE = 4, 4.3e12 / 132 / 1.98e9
REGISTERS, MAX_THREADS = 65536, 2048
ACCESS = 700  # cycles of latency
WIDEST = 16  # bytes of an access
LATENCY = 4 * ACCESS  # three numbers from the table one after the other, then the tile
CACHE_BYTES_PER_CYCLE = 5120
# Rows and columns of Qwen3-8B's layers: gate and up, down, QKV, output.
LAYERS = ((24576, 4096), (4096, 12288), (6144, 4096), (4096, 4096))
TOKENS = (1, 16)
LINEAR_LIMIT = 4.5  # instructions for each code


@dataclass(frozen=True)
class Case:
    """One kernel with its constants.

    Attributes:
        elements: of a program.
        bytes: moved per element, source and destination.
        limit: instructions per element; None: only shown.
        types: of the arguments, where the kernel is none of a `CastTable`.
        max_registers: where there is a limit.
        divisible: arguments that 16 divides.
    """

    name: str
    kernel: Any
    constants: dict[str, Any]
    options: dict[str, Any]
    elements: int
    bytes: int
    limit: float | None = None
    types: dict[str, str] | None = None
    max_registers: int = MAX_REGISTERS
    divisible: tuple[str, ...] = ()


def cases() -> list[Case]:
    found = list[Case]()
    for kind, label in ((BF16, "BF16"), (FP16, "FP16"), (FP32, "FP32")):
        size, rounding = (2, 4)[kind == FP32], {"POW2": False, "ROUND": True, "PACKED": True}
        for ragged, source_align, align, limit in (
            (False, 16, 16, MAX_INSTRUCTIONS[kind]),
            (True, 16, 16, MAX_INSTRUCTIONS[kind]),
            (True, 8, 8, 13.0 if kind == FP16 else 12.0),
            (True, 4, 4, None),
            (True, size, 1, None),
        ):
            constants = {"SOURCE_ALIGN": source_align, "TARGET_ALIGN": align}
            constants |= {"KIND": kind, **rounding}
            name = f"tile {label}{' ragged' if ragged else ''}, {source_align} → {align} bytes"
            sizes = cast_options(0, ragged, align)
            found += casts(name, constants, sizes, size + 1, limit, of_matrix=align == WIDEST)
        aligned = {"SOURCE_ALIGN": 16, "TARGET_ALIGN": 16}
        for chunk in (2048, 8192, 16384):
            constants, sizes = {**aligned, "KIND": kind, **rounding}, cast_options(chunk, True, 16)
            name = f"channel {label}, {chunk} columns"
            found += casts(name, constants, sizes, size + 1, 13.0, of_matrix=chunk == 8192)
        constants = {
            **aligned,
            "CHUNK": 4096,
            "KIND": kind,
            "TO": BF16,
            "SCALES": False,
            "PACKED": True,
        }
        options = {"num_warps": row_warps(4096)}
        found.append(
            Case(f"copy {label} → BF16, 4096 columns", table_copy_kernel, constants, options,
                 4096, size + 2)
        )  # fmt: skip
        for to, into in ((FP32, "FP32"), (BF16, "BF16"), (FP16, "FP16")):
            constants = {**aligned, "CHUNK": 4096, "KIND": kind, "TO": to, "PACKED": True}
            name = f"one matrix: copy {label} → {into}, 4096 columns"
            moved = size + (4 if to == FP32 else 2)
            found.append(Case(name, matrix_copy_kernel, constants, options, 4096, moved, 13.0))
    constants = {**aligned, "CHUNK": 4096}
    found.append(Case("codes, 4096 columns", table_codes_kernel, constants, options, 4096, 2))
    return [*found, *through_cases(), *fingerprint_cases(), *doubled_cases()]


def casts(
    name: str,
    constants: dict[str, Any],
    sizes: dict[str, Any],
    moved: int,
    limit: float | None,
    *,
    of_matrix: bool,
) -> Iterator[Case]:
    """The cast of a table's pieces, and of one matrix; `sizes` with the options of the launch."""
    constants, options = parted({**constants, **sizes})
    elements = constants["HEIGHT"] * constants["WIDTH"]
    yield Case(name, table_cast_kernel, constants, options, elements, moved, limit)
    if of_matrix:
        constants = {**constants, "THROUGH": False}
        name = f"one matrix: {name}"
        yield Case(name, matrix_cast_kernel, constants, options, elements, moved, limit)


def parted(constants: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A kernel's constants, and the options of its launch."""
    of_kernel = {name: one for name, one in constants.items() if name.isupper()}
    return of_kernel, {name: one for name, one in constants.items() if not name.isupper()}


def through_cases() -> Iterator[Case]:
    """The cast and back to BF16. From FP32 a program less of ragged tiles fits on a multiprocessor."""
    for dtype, label, ragged in (
        (torch.bfloat16, "BF16", MAX_REGISTERS),
        (torch.float16, "FP16", MAX_REGISTERS),
        (torch.float32, "FP32", 72),
    ):
        for name, shape, is_row, limit, registers in (
            ("whole tiles", (256, 384), False, 14.0, MAX_REGISTERS),
            ("ragged tiles, 16 bytes", (200, 328), False, 14.0, ragged),
            ("ragged tiles, odd rows", (200, 329), False, 28.0, 255),
            ("rows, 4096 columns", (8, 4096), True, 28.0, MAX_REGISTERS),
            ("rows, 5001 columns", (8, 5001), True, 28.0, 255),
        ):
            source, target = torch.empty(shape, dtype=dtype), torch.empty(shape).bfloat16()
            found = constants_of(source, target, is_row, {"POW2": False, "ROUND": True})
            constants, options = parted({**found, "PACKED": True})
            elements = constants["HEIGHT"] * constants["WIDTH"]
            yield Case(f"through FP8, {label}, {name}", matrix_cast_kernel, constants, options,
                       elements, dtype.itemsize + 2, limit, None, registers)  # fmt: skip


def fingerprint_cases() -> Iterator[Case]:
    """Numbers of what is served: an element of FP8 is a byte, of BF16 two."""
    types = {"matrices": "*i64", "owners": "*i32", "numbers": "*i64"}
    for align, size, name, limit in (
        (16, 1, "FP8", 6.0),
        (16, 2, "BF16", 12.0),
        (4, 4, "FP32, 4 bytes at a time", 64.0),
        (1, 1, "FP8, odd rows", 64.0),
    ):
        constants = {"ALIGN": align, "HEIGHT": HEIGHT, "LANES": LANES}
        elements = HEIGHT * LANES * align // size
        yield Case(f"fingerprint, {name}", numbers_kernel, constants, {"num_warps": WARPS},
                   elements, size, limit, types, 128)  # fmt: skip


def doubled_cases() -> Iterator[Case]:
    """Rows, and what quantizing them leaves: 2 bytes in and 4 out."""
    types = {"x": "*i16", "out": "*i16", "m": "i32", "k": "i32", "x_stride": "i32"}
    for group, name in ((128, "blocks"), (4096, "rows of 4096")):
        constants = {"KIND": BF16, "POW2": False, **doubled_tile(group)}
        options = {"num_warps": constants.pop("num_warps")}
        elements = constants["HEIGHT"] * constants["WIDTH"]
        yield Case(f"doubled BF16, {name}", doubled_kernel, constants, options, elements, 6,
                   DOUBLED_LIMIT, types, 80, ("k", "x_stride"))  # fmt: skip


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
    code = compile_kernel(
        case.kernel, case.constants, capability, case.types, case.divisible, **case.options
    )
    per_thread = case.elements / (32 * case.options["num_warps"])
    return {
        "benchmark": "sass",
        "case": case.name,
        "sm": capability,
        "instructions_per_element": round(len(code.executed) / per_thread, 2),
        "limit": case.limit,
        "registers": code.registers,
        "max_registers": case.max_registers,
        "spilled_bytes": code.spilled,
        "loads": wide(code, "LDG"),
        "stores": wide(code, "STG"),
        "modelled_share_of_copy": round(share_of_copy(case, code), 2) if capability == 90 else None,
        "triton": metadata.version("triton"),
    }


def programs_at_once(code: MachineCode, warps: int) -> int:
    """Of one multiprocessor."""
    by_registers = REGISTERS // (-(-code.registers // 8) * 8 * 32 * warps)
    return max(1, min(by_registers, HOPPER_SHARED // code.shared, MAX_THREADS // 32 // warps))


def linear_row(m: int, n: int, k: int) -> dict[str, Any]:
    """The product of `m` tokens with a layer of `[n, k]` codes, see this module's docstring."""
    code, tile = compiled(n, 90), tile_for(n)
    programs = -(-m // tile.tokens) * -(-n // tile.rows)
    busiest, steps = -(-programs // MULTIPROCESSORS), -(-k // tile.columns)
    issued = len(code.loop) * steps + len(code.executed) - len(code.loop)
    in_turn = -(-busiest // programs_at_once(code, tile.warps))
    cycles = {
        "memory": n * k / BYTES_PER_CYCLE / MULTIPROCESSORS,
        "issue": busiest * issued * tile.warps / SLOTS,
        "cache": (n * k + programs * min(m, tile.tokens) * 2 * k) / CACHE_BYTES_PER_CYCLE,
        "latency": in_turn * (1 + steps / (tile.stages - 1)) * ACCESS,
    }
    limit = max(cycles, key=lambda name: cycles[name])
    return {
        "benchmark": "sass_linear",
        "tokens": m,
        "layer": f"{n} × {k}",
        "instructions_per_code": round(len(code.loop) / tile.codes_per_thread, 2),
        "registers": code.registers,
        "spilled_bytes": code.spilled,
        "programs": programs,
        "limit": limit,
        "modelled_share_of_weights_bandwidth": round(cycles["memory"] / cycles[limit], 2),
        "triton": metadata.version("triton"),
    }


def above_limits(rows: list[dict[str, Any]], products: list[dict[str, Any]]) -> list[str]:
    """What is above a limit, of the rows of kernels and of products."""
    missed = [
        row["case"]
        for row in rows
        if row["limit"]
        and (
            row["instructions_per_element"] > row["limit"]
            or row["registers"] > row["max_registers"]
            or row["spilled_bytes"] > MAX_SPILLED[row["sm"]]
        )
    ]
    return missed + [
        f"{row['tokens']} tokens × {row['layer']}"
        for row in products
        if row["instructions_per_code"] > LINEAR_LIMIT or row["spilled_bytes"]
    ]


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
    for column in ("sm", "kernel", "instructions per element", "limit", "registers", "at most", "spilled",
                   "loads", "stores", "of copy (model)"):  # fmt: skip
        table.add_column(column)
    for row in rows:
        shown = list(row.values())[1:-1]
        shown[0], shown[1] = shown[1], shown[0]
        table.add_row(*("" if cell is None else str(cell) for cell in shown))
    console = Console()
    console.width = max(console.width, 160)
    console.print(table)
    products = [linear_row(m, *layer) for layer in LAYERS[: 1 if guard else None] for m in TOKENS]
    table = Table(title="product with stored codes, sm_90")
    for column in ("tokens", "layer", "instructions per code", "registers", "spilled", "programs",
                   "limit", "of the weights' bandwidth (model)"):  # fmt: skip
        table.add_column(column)
    for row in products:
        table.add_row(*map(str, list(row.values())[1:-1]))
    console.print(table)
    measured.append(json_path, [*rows, *products])
    missed = above_limits(rows, products)
    if missed:
        console.print(f"[red]above the limits: {', '.join(missed)}[/red]")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
