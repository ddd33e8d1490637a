"""A CPU as a veRL platform: what its trainer needs to run without a GPU.

veRL loads this by `VERL_USE_EXTERNAL_MODULES` and picks it by `VERL_PLATFORM=fp8rl_cpu`. Ray is told
of one logical GPU per worker; nothing looks for the real one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from verl_trainer.names import PLATFORM


def _nothing(*_: Any, **__: Any) -> None:
    return None


# `torch.cpu` with what veRL calls on any accelerator's module.
_MODULE = SimpleNamespace(
    **{name: getattr(torch.cpu, name) for name in ("synchronize", "device_count", "is_available")},
    current_device=lambda: torch.device("cpu"),
    set_device=_nothing,
    empty_cache=_nothing,
    ipc_collect=_nothing,
    reset_peak_memory_stats=_nothing,
    memory_allocated=lambda *_: 0,
    memory_reserved=lambda *_: 0,
    max_memory_allocated=lambda *_: 0,
    max_memory_reserved=lambda *_: 0,
    mem_get_info=lambda *_: (1 << 33, 1 << 34),
    get_device_name=lambda *_: "cpu",
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
)


@PlatformRegistry.register(platform=PLATFORM)
class CpuPlatform(PlatformBase):
    """Every abstract method of veRL's `PlatformBase`, for a CPU."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _MODULE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")  # veRL hands it to `tensor.to`

    def device_count(self) -> int:
        return int(os.environ.get("WORLD_SIZE", "1"))

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None

    def rollout_env_vars(self) -> dict[str, str]:
        return {"SGLANG_PLATFORM": "fp8rl_cpu", "CUDA_VISIBLE_DEVICES": ""}


def _name_gloo_once() -> None:
    """veRL's default is `cpu:gloo` and the platform's own, and torch refuses a device named twice.

    Side effects on the host: the default of one argument. Until veRL names a device once.
    """
    from verl.utils import distributed

    start = distributed.initialize_global_process_group_ray
    start.__defaults__ = (start.__defaults__[0], "cpu:gloo")


_name_gloo_once()
