"""What runs inside a scheduler: other scales, other keys, and what they change."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from support.engine import kv_commands
from support.engine.commands import model_of
from support.engine.generation import finish, generate
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_fp8rl.engine.kv_scales.calibration import largest_of_text
from sglang_fp8rl.engine.kv_scales.choice import ROOM, chosen, exponents_of, table_of


def largest(scheduler: Any, prompts: list[list[int]]) -> list[tuple[float, float]]:
    """Per layer the largest key and value that the prompts make, before anything is scaled."""
    found: dict[int, list[float]] = {}

    def around(module: Any) -> Callable[..., Any]:
        def forward(q: Any, k: Any, v: Any, *args: Any, **kw: Any) -> Any:
            seen = found.setdefault(module.layer_id, [0.0, 0.0])
            seen[:] = [max(seen[0], float(k.abs().max())), max(seen[1], float(v.abs().max()))]
            return type(module).forward(module, q, k, v, *args, **kw)

        return forward

    around_attention(scheduler, around)
    score(scheduler, prompts)
    around_attention(scheduler, None)
    return [(keys, values) for _, (keys, values) in sorted(found.items())]


def calibrated(scheduler: Any, tokens: list[int]) -> list[tuple[int, int]]:
    """What a server that calibrates with these tokens would choose."""
    fold = kv_commands.fold_of(scheduler)
    with fold.unfolded():
        largest_now = largest_of_text(model_of(scheduler), tokens, fold.layers)
        read = functools.partial(table_of, fold.layers, largest_now)
        found = chosen(kv_commands.kv_of(scheduler).group, read, ROOM["calibrated"])
    return [tuple(one) for one in exponents_of(found).tolist()]


def center(scheduler: Any, prompts: list[list[int]]) -> None:
    """From now on the mean key that these prompts make, by head and channel, is taken off every key."""
    seen: dict[int, list[torch.Tensor]] = {}

    def watching(module: Any) -> Callable[..., Any]:
        def forward(q: Any, k: Any, v: Any, *args: Any, **kw: Any) -> Any:
            seen.setdefault(module.layer_id, []).append(k.flatten(1).float())
            return type(module).forward(module, q, k, v, *args, **kw)

        return forward

    around_attention(scheduler, watching)
    score(scheduler, prompts)
    means = {number: torch.cat(rows).mean(0) for number, rows in seen.items()}

    def without(module: Any) -> Callable[..., Any]:
        def forward(q: Any, k: Any, v: Any, *args: Any, **kw: Any) -> Any:
            k = (k.flatten(1).float() - means[module.layer_id]).to(k.dtype).view(k.shape)
            return type(module).forward(module, q, k, v, *args, **kw)

        return forward

    around_attention(scheduler, without)


def scale_exactly(scheduler: Any, scales: list[tuple[float, float]] | None) -> None:
    """SGLang's own scales, as a reference: what is stored is divided, in BF16."""

    def around(module: Any) -> Callable[..., Any]:
        assert scales is not None
        a, b = scales[module.layer_id]

        def forward(q: Any, k: Any, v: Any, *args: Any, **kw: Any) -> Any:
            return type(module).forward(module, q * a, k / a, v / b, *args, **kw) * b

        return forward

    around_attention(scheduler, around if scales else None)


def around_attention(scheduler: Any, around: Callable[[Any], Any] | None) -> None:
    from sglang.srt.layers.radix_attention import RadixAttention

    for module in model_of(scheduler).modules():
        if isinstance(module, RadixAttention):
            vars(module).pop("forward", None)
            if around is not None:
                module.forward = around(module)


def score(scheduler: Any, prompts: list[list[int]]) -> list[float]:
    """Log-probabilities of the prompts' tokens."""
    assert scheduler.flush_cache()
    return [value for prompt in prompts for value in generate(scheduler, prompt, 1)[1][:-1]]


def bytes_per_token(scheduler: Any) -> float:
    pool = scheduler.tp_worker.model_runner.token_to_kv_pool
    sizes = [buffer.nbytes for buffer in (*pool.k_buffer, *pool.v_buffer)]
    return sum(sizes) / len(pool.k_buffer[0])


def decode_operations(scheduler: Any) -> dict[str, int]:
    """What torch dispatches in the decode steps of one request."""
    counted: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            counted[str(function)] += 1
            return function(*args, **(kwargs or {}))

    kv_commands.start_request(scheduler, list(range(9, 29)))
    with Count():
        kv_commands.step(scheduler)
    finish(scheduler)
    return dict(counted)


def errors_of(found: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """Of log-probabilities against exact ones, token by token."""
    difference = found.double() - exact.double()
    ratio = -difference
    return {
        "mean_abs_dlogp": float(difference.abs().mean()),
        "k3": float((ratio.exp() - 1 - ratio).mean()),
    }
