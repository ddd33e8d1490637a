"""Write a checkpoint as DeepSeek and Qwen publish block-FP8: the codes and scales that are served.

What is quantized is what the plan says. Streams file by file: no more than one file's tensors are in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import INDEX_NAME, checkpoint_directory, safetensors_files, tensors_in
from ..errors import ConfigError, QuantizationError
from ..formats import FORMATS
from ..scheme import Cause
from ..trainer import quantize_for_refit
from ..wire.plan import UNUSED, RefitPlan, TensorPlan
from .plan_offline import make_plan
from .terminal import in_the_way_of
from .testing.checkpoints import save_tensors
from .testing.weight_sets import Checkpoint, quantized_already

_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
_DTYPES = ("dtype", "torch_dtype")
# SGLang asks for the parts of a fused module, whatever the checkpoint calls it.
_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass
class ExportReport:
    """What was written: numbers of weights (`short`: of those in FP8 whose last block is short, which only SGLang reads),
    bytes of all tensors, and the weights that can't be cut into blocks and stay in BF16, each with the reason."""

    quantized: int = 0
    short: int = 0
    kept: int = 0
    nbytes_before: int = 0
    nbytes: int = 0
    misaligned: dict[str, str] = field(default_factory=dict)


def export_checkpoint(
    model: str,
    out: Path,
    *,
    tp_size: int = 1,
    options: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    on_start: Callable[[int], None] = lambda total: None,
    on_bytes: Callable[[int], None] = lambda done: None,
) -> ExportReport:
    """Read `model`, quantize what the plan has in blocks, and write `out`.

    Args:
        model: directory of a checkpoint in safetensors, or a name that is cached here.
        out: a directory that is empty or not there.
        tp_size: the largest that it will be served with: what can't be cut then stays in BF16.
        on_start, on_bytes: called with all bytes to read, and with those of each tensor.

    Raises:
        ConfigError: no such checkpoint, already quantized, nothing to quantize, or `out` is not empty or can't
            be written: nothing was written, or no config.json where there was no room for all.
        HostError: SGLang can't build the model.
        QuantizationError: a weight with NaN or Inf. `out` has no config.json then.
    """
    directory = checkpoint_directory(model)
    files = safetensors_files(directory) if directory is not None else []
    if directory is None or not files:
        rule, remedy = "an export reads them", "Name its directory, or download it first."
        raise ConfigError(model, "no safetensors", rule, remedy)
    _check_place(out)
    config = Checkpoint(directory).config
    found = (config.get("quantization_config") or {}).get("quant_method", "fp8_blockwise_online")
    if found != "fp8_blockwise_online":
        raise quantized_already(model, f"quant_method {found!r}")
    plan = make_plan(
        model,
        tp_size=tp_size,
        dtype="bfloat16",
        options=options,
        trust_remote_code=trust_remote_code,
    )
    if not any(_is_exported_in_fp8(entry) for entry in plan.tensors.values()):
        rule = "an export writes what is served in FP8 blocks"
        remedy = "`sglang-fp8rl plan` with the same --options has the reasons."
        raise ConfigError(model, "no weight is served in FP8 blocks", rule, remedy)
    out.mkdir(parents=True, exist_ok=True)
    on_start(sum(path.stat().st_size for path in files))
    report = ExportReport()
    weight_map: dict[str, str] = {}
    for path in files:
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in tensors_in([path]):
            tensors |= _converted(name, tensor, plan, report)
            report.nbytes_before += tensor.nbytes
            on_bytes(tensor.nbytes)
        save_tensors(tensors, out / path.name)
        report.nbytes += sum(tensor.nbytes for tensor in tensors.values())
        weight_map |= dict.fromkeys(tensors, path.name)
    if [path.name for path in files] != ["model.safetensors"]:  # which alone is found without
        index = {"metadata": {"total_size": report.nbytes}, "weight_map": weight_map}
        (out / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    for path in directory.iterdir():  # tokenizer, generation config, templates, code
        skipped = path.name in ("config.json", INDEX_NAME) or path.name.startswith(".")
        if path.is_file() and not skipped and path.suffix not in _NOT_COPIED:
            shutil.copy(path, out / path.name)
    config["quantization_config"] = quantization_config(plan)
    # In every part of it: SGLang serves in what `text_config` says, where there is one.
    config = json.loads(json.dumps(config), object_hook=_in_bf16)
    config |= dict.fromkeys(_DTYPES, "bfloat16")
    # Last, so that what was left half-way is no checkpoint.
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return report


def _check_place(out: Path) -> None:
    above = in_the_way_of(out)
    if above is not None:
        rule, remedy = "it has to be a directory that can be written", "Choose another place."
        raise ConfigError(str(out), f"no directory can be made at {above}", rule, remedy)
    if out.exists() and any(out.iterdir()):
        rule = "an export writes into a new directory"
        raise ConfigError(str(out), "not empty", rule, "Move it.")


def _in_bf16(part: dict[str, Any]) -> dict[str, Any]:
    """A part of a config that says its dtype if it said one."""
    return part | {name: "bfloat16" for name in _DTYPES if name in part}


def quantization_config(plan: RefitPlan) -> dict[str, Any]:
    """The section of `config.json` that SGLang's `fp8` and `transformers` read."""
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": plan.document["options"]["weight_block_size"],
        "modules_to_not_convert": sorted(set(_kept_modules(plan))),
    }


def _kept_modules(plan: RefitPlan) -> Iterator[str]:
    for name, entry in plan.tensors.items():
        dimensions = len(entry.shape or ())
        if dimensions == 3:
            yield entry.module  # experts in one tensor: their scales would have no names
        if name.endswith(".weight") and dimensions == 2 and not _is_exported_in_fp8(entry):
            module = name.removesuffix(".weight")
            yield module
            prefix, _, leaf = module.rpartition(".")
            yield from (f"{prefix}.{part}" for part in _PARTS.get(leaf, ()))


def _is_exported_in_fp8(entry: TensorPlan) -> bool:
    return entry.is_fp8_on_wire and FORMATS[entry.scheme].weight_block_size is not None


def _converted(
    name: str, tensor: torch.Tensor, plan: RefitPlan, report: ExportReport
) -> dict[str, torch.Tensor]:
    """What is written in place of a tensor: codes and scale, or itself in the dtype that is served."""
    entry = plan.tensors.get(name)
    if entry is not None and _is_exported_in_fp8(entry):
        report.quantized += 1
        made = list(quantize_for_refit([(name, tensor)], plan))
        blocks = zip(tensor.shape, plan.document["options"]["weight_block_size"], strict=True)
        report.short += any(size > block and size % block for size, block in blocks)
        return {written: one.contiguous() for written, one in made}
    report.kept += 1
    if not tensor.is_floating_point():
        return {name: tensor}
    if tensor.element_size() == 1:
        raise quantized_already(name, str(tensor.dtype))
    wanted = tensor.dtype
    if entry is not None and entry.scheme != UNUSED:
        held = FORMATS.get(entry.scheme)
        is_kept = held is not None and held.weight_block_size is None  # no checkpoint has it so
        wanted = torch.bfloat16 if is_kept else getattr(torch, entry.dtype)
        module = plan.modules.get(entry.module)
        why = entry.reason if is_kept else ""
        if module is not None and (is_kept or module.cause is Cause.MISALIGNED):
            why = module.reason or why
        if why:
            report.misaligned[name] = why
    rounded = tensor.to(wanted)
    is_served = entry is not None and entry.scheme != UNUSED
    if is_served and not bool(torch.isfinite(rounded).all()):
        found, rule = f"NaN, Inf or too large for {wanted}", "every value that is served is finite"
        raise QuantizationError(name, found, rule, "Look at the step that produced this weight.")
    return {name: rounded.contiguous()}
