"""A judge's process has no GPU: where a model names CUDA while it is built, it gets the CPU.

Kernels are another matter: what needs one is not run, and its row says so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

LARGE = 2**18
_DRAWN = {torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.erfinv_}


class OnCpu(TorchFunctionMode):
    """Tensors that are made on CUDA in here are made on the CPU.

    What a model draws for a large weight is not drawn: a checkpoint writes it.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        if func in _DRAWN and args[0].numel() > LARGE:
            return args[0].zero_()
        args = tuple(torch.device("cpu") if _is_cuda(one) else one for one in args)
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"


class _Nothing:
    """A stream or event that nothing waits for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


def name_the_cpu() -> None:
    """What asks torch for its device gets the CPU.

    Side effects on the host: torch's device module, in this process, which ends with its one class.
    """
    cpu: Any = torch.cpu
    torch.get_device_module = lambda *_: cpu  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # SGLang chooses backends by it
    torch.cuda.Stream = torch.cuda.Event = _Nothing  # type: ignore[assignment, misc]
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None  # type: ignore[assignment]
