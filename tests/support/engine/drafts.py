"""SGLang's own draft model beside a scheduler's target, kept for functions that run there later (see `engine_host`)."""

from __future__ import annotations

from typing import Any

import torch


def build_draft(scheduler: Any) -> Any:
    """From the target's checkpoint; quantized as a speculating server passes it on."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import get_model

    args = scheduler.server_args
    config = ModelConfig.from_server_args(args, model_path=args.model_path, is_draft_model=True)
    config.quantization = scheduler.model_config.quantization
    scheduler.test_draft = get_model(
        model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu")
    )
    return scheduler.test_draft


def draft_values(scheduler: Any) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in scheduler.test_draft.named_parameters()}


def check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
