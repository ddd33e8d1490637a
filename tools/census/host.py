"""SGLang's own start, up to where a loader builds the model: there the judge takes over."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import preload
from .no_cuda import OnCpu, name_the_cpu

QUANTIZATION = "fp8_blockwise_online"


class Builder:
    """Builds the model of one config, as often as asked."""

    def __init__(self, model_config: Any, load_config: Any) -> None:
        self._config, self._load_config = model_config, load_config
        if has_a_number(class_of(model_config)):
            load_config.draft_model_idx = 0

    @property
    def path(self) -> str:
        return self._config.model_path

    def build(self, *, is_quantized: bool = True) -> tuple[Any, Any]:
        """A model in ordinary memory, and its refit; None without quantization."""
        import torch
        from sglang.srt.model_loader import loader
        from sglang.srt.model_loader.utils import set_default_torch_dtype

        from sglang_fp8rl.engine.refit import refit_of

        quant_config = None
        if is_quantized:
            quant_config = loader._get_quantization_config(self._config, self._load_config)
        torch.manual_seed(0)  # for what a model draws itself
        with OnCpu(), set_default_torch_dtype(self._config.dtype), torch.device("cpu"):
            model = loader._initialize_model(self._config, self._load_config, quant_config)
        return model, refit_of(model)

    @staticmethod
    def load(model: Any, weights: list[tuple[str, Any]]) -> None:
        """As SGLang loads a checkpoint."""
        import torch
        from sglang.srt.model_loader.loader import DefaultModelLoader

        DefaultModelLoader.load_weights_and_postprocess(model, iter(weights), torch.device("cpu"))


def class_of(model_config: Any) -> type:
    from sglang.srt.model_loader.utils import get_model_architecture

    return get_model_architecture(model_config)[0]


def has_a_number(model_class: type) -> bool:
    """Whether SGLang tells the model which of several drafts it is."""
    return "draft_model_idx" in inspect.signature(model_class).parameters


def start(
    path: Path,
    attention: str,
    present: preload.AtStart,
    rank: int = 0,
    arguments: Sequence[str] = (),
) -> None:
    """Start a rank of a server of the model in `path`, with somebody present, up to its first request.

    Side effects on the host: this process has a process group and SGLang's state, and ends afterwards.
    """
    from sglang_fp8rl.lab.plan_offline import _start_scheduler

    preload.present.append(present)
    name_the_cpu()
    argv = [f"--model-path={path}", f"--quantization={QUANTIZATION}", "--device=cpu"]
    argv += ["--load-format=dummy", "--skip-tokenizer-init", "--max-total-tokens=1024"]
    argv += ["--context-length=512", f"--attention-backend={attention}"]
    argv += ["--max-running-requests=2", "--disable-cuda-graph"]
    with contextlib.suppress(preload.Judged):
        _start_scheduler([*argv, *arguments], rank)


# An exception's line at the end of a traceback, and not the remedy that SGLang prints behind some.
_ERROR = re.compile(
    r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b.*(?:(?<=:)\n.*)?", re.MULTILINE
)


def last_error(log: str) -> str:
    """The last exception that a log shows, on one line."""
    found = _ERROR.findall(log)
    text = " ".join(found[-1].split()) if found else ""
    return text if found else "ended without a word"
