"""Real servers on the CPU platform: what they answer is what the weights say.

The oracle is the `transformers` model of the same family in BF16, with its projections replaced by
a W8A8 product written here. Other places of BF16 rounding between projections are the tolerance; the
controls show that it is below what quantizing the weights changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from block_fp8 import BLOCK_FP8_CONFIG, quantized, quantized_names
from support.engine.forked import WithoutPlugins, run_forked
from support.engine.options import overridden
from support.server.served import QUANTIZED

from sglang_fp8rl.client import RefitClient
from sglang_fp8rl.lab.testing.checkpoints import (
    make_config,
    make_state_dict,
    save_checkpoint,
)
from sglang_fp8rl.lab.testing.server import ServerProcess

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("server")]

PROMPT = [5, 6, 7, 8, 9, 10, 301, 77, 400, 12, 9, 480]


def block_cast(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Offline 128×128 quantization, written for this test (sizes are multiples of 128)."""
    rows, columns = weight.shape
    tiles = weight.bfloat16().float().view(rows // 128, 128, columns // 128, 128)
    scale = tiles.abs().amax(dim=(1, 3)) / 448
    q = (tiles / scale[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return q.view(rows, columns), scale


def dequantized(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return q.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)


class W8A8(torch.nn.Module):
    """A projection with activations rounded to e4m3 per token and 128 columns."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(dequantized(*block_cast(weight)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.float().view(*x.shape[:-1], -1, 128)
        scale = groups.abs().amax(dim=-1, keepdim=True) / 448
        rounded = ((groups / scale).to(torch.float8_e4m3fn).float() * scale).view(x.shape)
        return torch.nn.functional.linear(rounded, self.weight).to(x.dtype)


def served_weights(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = set(quantized_names(state_dict))
    return {n: dequantized(*block_cast(w)) if n in names else w for n, w in state_dict.items()}


def oracle_logprobs(state_dict: dict[str, torch.Tensor], *, w8a8: bool = False) -> torch.Tensor:
    """Log-probability of every prompt token but the first."""
    from transformers import Qwen3ForCausalLM

    model: Any = Qwen3ForCausalLM(make_config("qwen3")).eval().to(torch.bfloat16)
    model.load_state_dict(state_dict)
    if w8a8:
        for name in quantized_names(state_dict):
            module = name.removesuffix(".weight")
            model.set_submodule(module, W8A8(state_dict[name]))
    with torch.no_grad():
        logprobs = model(torch.tensor([PROMPT])).logits[0].float().log_softmax(dim=-1)
    return logprobs[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]


def prompt_logprobs(server: ServerProcess) -> torch.Tensor:
    server.post("/flush_cache")
    answer = RefitClient(server.url).generate(PROMPT, 1)
    return torch.tensor([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]])


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().mean())


@pytest.fixture(scope="module")
def state_dict() -> dict[str, torch.Tensor]:
    return make_state_dict(make_config("qwen3"))


@pytest.fixture(scope="module")
def fp8_checkpoint(checkpoint_dir: Path, state_dict: dict[str, torch.Tensor]) -> Path:
    """Block FP8, as on the hub: SGLang serves it with its own `fp8` method."""
    return save_checkpoint(
        checkpoint_dir / "qwen3-block-fp8",
        make_config("qwen3"),
        quantized(state_dict, block_cast),
        dtype=torch.bfloat16,
        quantization_config=BLOCK_FP8_CONFIG,
    )


@pytest.mark.slow
def test_unquantized_server_computes_the_model(
    server: Any, dense_checkpoint: Path, state_dict: dict[str, torch.Tensor]
) -> None:
    got = prompt_logprobs(server(dense_checkpoint))
    assert error(got, oracle_logprobs(state_dict)) < 0.05
    assert error(got, oracle_logprobs(served_weights(state_dict))) > 0.1


@pytest.mark.slow
def test_with_activations_in_bf16_a_server_multiplies_by_the_dequantized_weights(
    server: Any, dense_checkpoint: Path, state_dict: dict[str, torch.Tensor]
) -> None:
    """The weights alone, to BF16 rounding."""
    running = server(dense_checkpoint, QUANTIZED, *overridden(activations="bf16"))
    got = prompt_logprobs(running)
    assert error(got, oracle_logprobs(served_weights(state_dict))) < 0.05
    assert error(got, oracle_logprobs(state_dict)) > 0.1


@pytest.mark.slow
def test_native_fp8_server_quantizes_activations(
    server: Any, fp8_checkpoint: Path, state_dict: dict[str, torch.Tensor]
) -> None:
    """A wide tolerance: one BF16 ulp moves an activation to the next e4m3 code, 2⁻⁴ away, and the
    oracle in BF16 is as far from itself in FP32. The product itself is checked by bits elsewhere.
    """
    running = server(fp8_checkpoint)
    got = prompt_logprobs(running)
    assert error(got, oracle_logprobs(state_dict, w8a8=True)) < 0.2
    assert error(got, oracle_logprobs(served_weights(state_dict))) > 0.05
    assert len(RefitClient(running.url).generate(PROMPT, 8)["output_ids"]) == 8


@pytest.mark.slow
def test_same_request_same_bits(server: Any, fp8_checkpoint: Path) -> None:
    running = server(fp8_checkpoint)
    assert torch.equal(prompt_logprobs(running), prompt_logprobs(running))


@pytest.mark.slow
def test_two_ranks_generate_what_one_does(server: Any, dense_checkpoint: Path) -> None:
    one = RefitClient(server(dense_checkpoint).url).generate(PROMPT, 16)
    sharded = server(dense_checkpoint, "--tp-size=2")
    two = RefitClient(sharded.url).generate(PROMPT, 16)
    assert two["output_ids"] == one["output_ids"]


def _say_what_is_hooked() -> None:
    import torch
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang_fp8rl.declared_hooks import _registered, targets_not_hooked

    print(len(_registered) > 15, targets_not_hooked())
    print(torch.multiprocessing.get_sharing_strategy())


def test_every_hook_is_applied(tmp_path: Path) -> None:
    log = tmp_path / "log"
    how = run_forked(_say_what_is_hooked, (), log, process_class=WithoutPlugins)
    assert how == "exit status 0", log.read_text()
    assert log.read_text().splitlines()[-2:] == ["True {}", "file_system"]
