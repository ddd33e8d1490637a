"""Write a checkpoint as DeepSeek and Qwen publish block-FP8: the codes and scales that are served.

What is quantized is what the plan says: the modules that SGLang builds for this model. Streams file by
file; nothing of SGLang is imported here, nor is there more than one file's worth of tensors in memory.
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
from ..engine.host.plan_offline import make_plan
from ..errors import ConfigError, QuantizationError
from ..scheme import Cause, Granularity
from ..trainer.quantize_for_refit import quantize_piece
from ..trainer.shards import piece_of
from ..wire.plan import UNUSED, RefitPlan, TensorPlan

_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
# SGLang asks for the parts of a fused module, whatever the checkpoint calls it.
_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

Progress = Callable[[int], None]


@dataclass
class ExportReport:
    """What was written.

    Attributes:
        quantized, kept: numbers of weights.
        nbytes_before, nbytes: of all tensors.
        misaligned: weights that can't be cut into blocks and stay in BF16, each with the reason.
    """

    quantized: int = 0
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
    on_start: Progress = lambda total: None,
    on_bytes: Progress = lambda done: None,
) -> ExportReport:
    """Read `model`, quantize what the plan has in blocks, and write `out`.

    Args:
        model: directory of a checkpoint in safetensors, or a name that is cached here.
        out: a directory that is empty or not there.
        tp_size: the largest that it will be served with: what can't be cut then stays in BF16.
        options: of `fp8_blockwise_online`.
        on_start, on_bytes: called with all bytes to read, and with those of each tensor.

    Raises:
        ConfigError: no such checkpoint, already quantized, or `out` is not empty. Nothing was written.
        HostError: SGLang can't build the model.
        QuantizationError: a weight with NaN or Inf. `out` has no config.json then.
    """
    directory = checkpoint_directory(model)
    files = safetensors_files(directory) if directory is not None else []
    if directory is None or not files:
        raise ConfigError(
            model,
            "no safetensors",
            "an export reads a checkpoint's safetensors",
            "Name its directory, or download it first.",
        )
    if out.exists() and any(out.iterdir()):
        raise ConfigError(
            str(out), "not empty", "an export writes into a new directory", "Move it."
        )
    config = json.loads((directory / "config.json").read_text())
    found = config.get("quantization_config", {}).get("quant_method", "fp8_blockwise_online")
    if found != "fp8_blockwise_online":
        raise ConfigError(
            model,
            f"quant_method {found!r}",
            "only an unquantized checkpoint is quantized",
            "Start from the BF16 or FP32 one.",
        )
    plan = make_plan(model, tp_size=tp_size, options=options, trust_remote_code=trust_remote_code)
    out.mkdir(parents=True, exist_ok=True)
    on_start(sum(path.stat().st_size for path in files))
    report, weight_map = ExportReport(), {}
    for path in files:
        tensors = {}
        for name, tensor in _converted(path, plan, report, on_bytes):
            tensors[name] = tensor.contiguous()
            weight_map[name] = path.name
        _save(tensors, out / path.name)
    if len(files) > 1:
        index = {"metadata": {"total_size": report.nbytes}, "weight_map": weight_map}
        (out / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    _copy_the_rest(directory, out)
    config["quantization_config"] = quantization_config(plan)
    config["dtype"] = config["torch_dtype"] = "bfloat16"
    # Last, so that what was left half-way is no checkpoint.
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return report


def quantization_config(plan: RefitPlan) -> dict[str, Any]:
    """The section of `config.json` that SGLang's `fp8` and `transformers` read."""
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": list(plan.block_size),
        "modules_to_not_convert": sorted(set(_kept_modules(plan))),
    }


def _kept_modules(plan: RefitPlan) -> Iterator[str]:
    for name, entry in plan.tensors.items():
        if entry.shape is not None and len(entry.shape) == 3:
            yield entry.module  # experts in one tensor: their scales would have no names
        if not name.endswith(".weight") or entry.shape is None or len(entry.shape) != 2:
            continue
        if not _is_exported_in_fp8(entry):
            module = name.removesuffix(".weight")
            yield module
            prefix, _, leaf = module.rpartition(".")
            yield from (f"{prefix}.{part}" for part in _PARTS.get(leaf, ()))


def _is_exported_in_fp8(entry: TensorPlan) -> bool:
    return entry.is_fp8_on_wire and entry.is_blockwise


def _converted(
    path: Path, plan: RefitPlan, report: ExportReport, on_bytes: Progress
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors_in([path]):
        for out_name, out_tensor in _convert(name, tensor, plan, report):
            report.nbytes += out_tensor.nbytes
            yield out_name, out_tensor
        report.nbytes_before += tensor.nbytes
        on_bytes(tensor.nbytes)


def _convert(
    name: str, tensor: torch.Tensor, plan: RefitPlan, report: ExportReport
) -> Iterator[tuple[str, torch.Tensor]]:
    entry = plan.tensors.get(name)
    if entry is not None and _is_exported_in_fp8(entry):
        codes, scale = quantize_piece(entry, piece_of(name, tensor), plan)
        report.quantized += 1
        yield name, codes
        yield entry.scale_name, scale
        return
    report.kept += 1
    if tensor.element_size() == 1 and tensor.is_floating_point():
        raise ConfigError(
            name, str(tensor.dtype), "only an unquantized checkpoint is quantized", "Use that one."
        )
    why_misaligned = _misalignment(entry, plan) if entry is not None else ""
    if why_misaligned:
        report.misaligned[name] = why_misaligned
    is_known = entry is not None and entry.scheme != UNUSED
    wanted = getattr(torch, entry.dtype) if is_known and entry is not None else tensor.dtype
    if tensor.is_floating_point() and entry is not None and entry.scheme == "per_channel":
        wanted = torch.bfloat16
    rounded = tensor.to(wanted) if tensor.is_floating_point() else tensor
    if not bool(torch.isfinite(rounded).all()) and bool(torch.isfinite(tensor).all()):
        raise QuantizationError(
            name, f"too large for {wanted}", "every value stays finite", "Look at this weight."
        )
    yield name, rounded


def _misalignment(entry: TensorPlan, plan: RefitPlan) -> str:
    """Why a weight is not in blocks, in words; empty if it is, or if somebody asked for it."""
    module = plan.modules.get(entry.module)
    if entry.scheme == Granularity.PER_CHANNEL.value:
        return (module.reason if module else "") or entry.reason
    return module.reason if module and module.cause is Cause.MISALIGNED else ""


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})


def _copy_the_rest(source: Path, out: Path) -> None:
    """Tokenizer, generation config, templates, code."""
    for path in source.iterdir():
        skipped = path.name in ("config.json", INDEX_NAME) or path.name.startswith(".")
        if path.is_file() and not skipped and path.suffix not in _NOT_COPIED:
            shutil.copy(path, out / path.name)
