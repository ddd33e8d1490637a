"""A checkpoint whose experts are one tensor a layer, as `transformers` 5 saves them."""

from __future__ import annotations

import re

import torch

_EXPERT = re.compile(
    r"(?P<experts>.*\.experts)\.(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight"
)


def with_fused_experts(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights with the experts of a layer in one tensor, as `transformers` 5 saves them.

    `experts.gate_up_proj` is `[E, 2I, H]` (gate rows first), `experts.down_proj` `[E, H, I]`.
    """
    result: dict[str, torch.Tensor] = {}
    found: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name, weight in state_dict.items():
        match = _EXPERT.fullmatch(name)
        if match:
            found.setdefault(match["experts"], {})[int(match["expert"]), match["part"]] = weight
        else:
            result[name] = weight
    for prefix, parts in found.items():
        count = 1 + max(expert for expert, _ in parts)
        result[f"{prefix}.gate_up_proj"] = torch.stack(
            [torch.cat([parts[e, "gate_proj"], parts[e, "up_proj"]]) for e in range(count)]
        )
        result[f"{prefix}.down_proj"] = torch.stack([parts[e, "down_proj"] for e in range(count)])
    return result
