"""What is served beside the weights: LoRA, drafts, CPU backups; and what is refused, with its reason."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version
from safetensors.torch import save_file
from support.engine.commands import digests, model_of, status
from support.engine.drafts import build_draft, check_same, draft_values
from support.engine.engine_host import EngineHost, command_line
from support.engine.fingerprint_commands import fingerprint
from support.engine.forked import run_forked
from support.engine.models import MODELS, Model, checkpoint
from support.engine.options import log_of_a_failed_start
from support.engine.pool import engine_key, on, runs_on

from sglang_fp8rl.compat import host_version
from sglang_fp8rl.errors import ConfigError
from sglang_fp8rl.lab import plan_offline
from sglang_fp8rl.lab.testing.checkpoints import perturbed, save_checkpoint
from sglang_fp8rl.versions import TELLS_WHAT_DRAFTS_ASKED_FOR

pytestmark = pytest.mark.engine

WITH_DRAFT = Model("deepseek-mtp", "deepseek_v3", (("num_nextn_predict_layers", 1),))


@contextmanager
def unpinned():
    """SGLang's LoRA asks for pinned memory, which takes a GPU; in here it gets plain one."""
    tensor = torch.tensor

    def plain(*args, pin_memory=False, **more):
        return tensor(*args, **more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "tensor", plain)
        patched.setattr(torch.Tensor, "pin_memory", lambda self: self)
        yield


LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def start_lora(scheduler):
    """As `--enable-lora` has SGLang do it: between the load and the point where a model is noted as loaded."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.lora.lora_manager import LoRAManager

    runner = scheduler.tp_worker.model_runner
    with unpinned():
        scheduler.test_lora = LoRAManager(
            base_model=runner.model,
            base_hf_config=scheduler.model_config.hf_config,
            max_loras_per_batch=2,
            load_config=LoadConfig(),
            dtype=runner.dtype,
            server_args=scheduler.server_args,
            lora_backend="torch_native",
            max_lora_rank=4,
            target_modules=LORA_TARGETS,
        )
    model_of(scheduler).fp8rl_refit.note_loaded()


def load_adapter(scheduler, path):
    """`/load_lora_adapter`, and the first batch that uses it."""
    from sglang.srt.lora.lora_registry import LoRARef

    reference, lora = LoRARef(lora_name=path, lora_path=path, pinned=False), scheduler.test_lora
    with unpinned():
        answer = lora.load_lora_adapter(reference)
        assert answer.success, answer.error_message
        lora.fetch_new_loras({reference.lora_id})


def pool_numbers(scheduler):
    pool = scheduler.test_lora.memory_pool
    return [
        float(one.double().abs().sum())
        for buffers in (pool.A_buffer, pool.B_buffer)
        for layers in buffers.values()
        for one in layers
    ]


def adapter(directory, model, seed):
    """An adapter of rank 4 for every linear layer, as PEFT writes one."""
    generator, state = torch.Generator().manual_seed(seed), {}
    for name, weight in model.first.items():
        module = name.removesuffix(".weight")
        if module.endswith(LORA_TARGETS):
            for leaf, shape in (("A", (4, weight.shape[1])), ("B", (weight.shape[0], 4))):
                key = f"base_model.model.{module}.lora_{leaf}.weight"
                state[key] = torch.randn(shape, generator=generator)
    directory.mkdir(parents=True)
    save_file(state, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(LORA_TARGETS)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return str(directory)


def wrap_with_lora(scheduler):
    """As `--enable-lora` does once the model is loaded; the flag itself wants pinned memory, a GPU."""
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend
    from sglang.srt.lora.layers import get_lora_layer
    from sglang.srt.utils import replace_submodule

    model = model_of(scheduler)
    backend = TorchNativeLoRABackend(max_loras_per_batch=1, device=torch.device("cpu"))
    layers = [name for name, module in model.named_modules() if isinstance(module, LinearBase)]
    for name in layers:
        if name.endswith(("o_proj", "down_proj")):
            replace_submodule(model, name, get_lora_layer(model.get_submodule(name), backend))
    return sum(".base_layer." in name for name, _ in model.named_parameters())


@on(engine_key("qwen3", label="with-lora"))
def test_updates_reach_layers_that_lora_wrapped_after_they_were_loaded(host, engine_pool):
    expected = engine_pool.fresh(engine_key("qwen3"))
    host.in_doubt = True  # its layers stay wrapped
    assert host.call(wrap_with_lora)
    for which in ("second", "first", "second"):
        host.send(list(getattr(host.model, which).items()))
        assert host.call(status)["consistent"]
    found = host.call(digests)
    plain = {name.replace(".base_layer.", "."): value for name, value in found.items()}
    assert [plain] == expected.digests
    assert host.say() == expected.said


@on(engine_key("qwen3", label="with-adapters"))
def test_updates_of_the_base_go_on_where_adapters_are_loaded(host, engine_pool, tmp_path):
    """Replayed and whole; an adapter's pools are no copies of weights, nor made of them."""
    expected = engine_pool.fresh(engine_key("qwen3"))
    host.in_doubt = True  # its layers stay wrapped
    host.call(start_lora)
    for seed, which in enumerate(("first", "second", "first", "second")):
        host.call(load_adapter, adapter(tmp_path / str(seed), host.model, seed))
        pools = host.call(pool_numbers)
        assert any(pools)
        host.send(list(getattr(host.model, which).items()))
        state = host.call(status)
        assert (state["state"], state["unproven"]) == ("whole", {})
        assert host.call(pool_numbers) == pools
    assert state["replay"]["calls"] == 3
    found = host.call(weight_digests)
    assert found.items() <= expected.digests[0].items()
    assert len(found) > 20
    assert not host.call(fingerprint).unproven


def weight_digests(scheduler):
    """Of parameters, under the names that they have without LoRA."""
    names = dict(model_of(scheduler).named_parameters())
    found = digests(scheduler)
    return {name.replace(".base_layer.", "."): found[name] for name in names}


def refusal_of_copies(scheduler):
    """What the start would say with `--dcp-replicate-q-proj`, which SGLang takes on a GPU only."""
    from sglang.srt import runtime_context

    from sglang_fp8rl.engine.modules.built import check_no_copies_of_the_start
    from sglang_fp8rl.errors import ConfigError

    check_no_copies_of_the_start(model_of(scheduler))
    with pytest.MonkeyPatch.context() as patched:
        flags = SimpleNamespace(dcp_replicate_q_proj=True)
        patched.setattr(runtime_context, "get_parallel", lambda: flags)
        try:
            check_no_copies_of_the_start(model_of(scheduler))
        except ConfigError as error:
            return str(error)
    return ""


@pytest.mark.skipif(host_version() < Version("0.5.23"), reason="this SGLang has no such flag")
@on("deepseek-v3-tp1")
def test_copies_of_q_proj_that_no_update_renews_are_refused(host):
    said = host.call(refusal_of_copies)
    for word in ("self_attn", "w_kc_qrep", "--dcp-replicate-q-proj", "--no-dcp-replicate-q-proj"):
        assert word in said


def start_first_stage(argv):
    """SGLang's own start of the first of two stages, up to its model; the other one stays silent."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    plan_offline._fake_other_ranks(2)
    plan_offline._start_scheduler(argv)


def test_pipeline_parallelism_is_refused_with_value_rule_and_remedy(checkpoint_dir, tmp_path):
    path, log = checkpoint(checkpoint_dir, MODELS["qwen3"], "first"), tmp_path / "log"
    argv = [*command_line(path, "fp8_blockwise_online"), "--pp-size=2"]
    ended = run_forked(start_first_stage, (argv,), log, env=plan_offline._child_env(1))
    assert "exit status" in ended, log.read_text()
    error = re.search(r"ConfigError: --pp-size: 2; (.*)", log.read_text())
    assert error, log.read_text()
    assert "a stage behind the first would be answered as a success" in error[1]
    assert error[1].endswith("a larger --tp-size.")


def test_the_memory_saver_is_refused_without_a_gpu(checkpoint_dir, tmp_path):
    path = checkpoint(checkpoint_dir, MODELS["qwen3"], "first")
    log = log_of_a_failed_start(path, tmp_path / "log", ("--enable-memory-saver",))
    assert "--enable-memory-saver: on the CPU platform; it pages CUDA memory" in log


def test_experts_with_biases_are_refused_with_the_reason(checkpoint_dir, tmp_path):
    """gpt-oss, which SGLang does not run on torch_native attention either."""
    path = checkpoint(checkpoint_dir, MODELS["gpt-oss"], "first")
    log = log_of_a_failed_start(path, tmp_path / "log", ("--attention-backend", "triton"))
    assert "model.layers.0.mlp.experts: experts with biases (gpt-oss)" in log


# -- an embedded draft model (MTP) -----------------------------------------------------------------


def with_draft(state, seed):
    """The checkpoint's tensors and those of the layer behind the last, as DeepSeek-V3 has them."""
    layer = {
        name.replace("layers.1.", "layers.2."): weight
        for name, weight in state.items()
        if ".layers.1." in name
    }
    prefix = "model.layers.2"
    layer |= {
        f"{prefix}.eh_proj.weight": 0.05 * torch.ones(256, 512),
        f"{prefix}.enorm.weight": torch.ones(256),
        f"{prefix}.hnorm.weight": torch.ones(256),
        f"{prefix}.shared_head.norm.weight": torch.ones(256),
        f"{prefix}.shared_head.head.weight": state["lm_head.weight"],
        f"{prefix}.embed_tokens.weight": state["model.embed_tokens.weight"],
    }
    return {**state, **perturbed(layer, seed)}


def draft_path(directory, which):
    path = directory / f"deepseek-mtp-{which}"
    if not path.exists():
        seed = {"first": 10, "second": 11}[which]
        save_checkpoint(path, WITH_DRAFT.config, with_draft(getattr(WITH_DRAFT, which), seed))
    return path


def draft_of(scheduler):
    """Its class, the names of its methods, and its dtypes."""
    draft = build_draft(scheduler)
    kinds = {type(getattr(module, "quant_method", None)).__name__ for module in draft.modules()}
    return type(draft).__name__, sorted(kinds), {str(p.dtype) for p in draft.parameters()}


def own_values(scheduler):
    """All but the embedding and the head: a speculating server shares the target's with it."""
    shared = ("embed_tokens", "lm_head", "shared_head.head")
    found = draft_values(scheduler).items()
    return {name: one for name, one in found if not any(part in name for part in shared)}


def update_draft(scheduler, items):
    scheduler.test_draft.load_weights(items)


@runs_on("deepseek-v3")
def test_an_embedded_draft_stays_in_high_precision_and_follows_the_same_tensors(checkpoint_dir):
    second = with_draft(WITH_DRAFT.second, 11)
    with EngineHost(draft_path(checkpoint_dir, "second")) as fresh:
        fresh.call(draft_of)
        expected, expected_draft = fresh.call(digests), fresh.call(own_values)
    with EngineHost(draft_path(checkpoint_dir, "first"), args=("--load-format", "dummy")) as host:
        name, kinds, dtypes = host.call(draft_of)
        assert name == "DeepseekV3ForCausalLMNextN"
        assert not any("Fp8" in kind for kind in kinds), kinds
        assert dtypes <= {"torch.bfloat16", "torch.float32"}
        # The target is sent the draft's tensors too, and skips them by design.
        host.send(list(second.items()))
        assert host.call(digests) == expected
        host.call(update_draft, list(second.items()))
        check_same(host.call(own_values), expected_draft)


def build_draft_in_fp8(scheduler):
    """As with `--speculative-draft-model-quantization fp8_blockwise_online`."""
    from sglang_fp8rl.engine.host import hooks

    native, hooks._draft_was_asked_for = hooks._draft_was_asked_for, lambda: True
    dtype = torch.get_default_dtype()  # SGLang 0.5.16 leaves the model's behind an error
    try:
        build_draft(scheduler)
    except ConfigError as error:
        return str(error)
    finally:
        hooks._draft_was_asked_for = native
        torch.set_default_dtype(dtype)


@pytest.mark.skipif(
    not TELLS_WHAT_DRAFTS_ASKED_FOR, reason="this SGLang has no word of what a draft was asked for"
)
@on("deepseek-v3-tp1")
def test_a_draft_in_fp8_is_refused_for_nothing_would_say_that_it_is_old(host):
    assert "--speculative-draft-model-quantization" in host.call(build_draft_in_fp8)


@on("deepseek-v3-tp1")
def test_tensors_behind_the_last_layer_are_unknown_to_a_model_without_a_draft(host):
    state = with_draft(host.model.first, 10)
    name = "model.layers.2.enorm.weight"
    host.refuses([(name, state[name])], name)


def fp8_names(scheduler):
    parameters = model_of(scheduler).named_parameters()
    return [name for name, p in parameters if p.dtype == torch.float8_e4m3fn]


@on("qwen2.5-vl-tp1", "qwen3-vl-tp1")
def test_the_language_model_is_quantized_and_the_vision_tower_is_not(host):
    """SGLang hands the one's tower the quantization and not the other's."""
    found = host.call(fp8_names)
    plan = {row["module"]: row for row in host.call(status)["plan"]}
    assert len(found) == 8
    assert all(name.startswith("model.layers.") for name in found)
    towers = [row for module, row in plan.items() if module.startswith("visual.")]
    assert all(row["scheme"] == "high_precision" and "tower" in row["reason"] for row in towers)
    assert bool(towers) == (host.model.name == "qwen2.5-vl")


@on("mixtral-tp1")
def test_mixtral_has_fused_experts(host):
    assert "model.layers.0.block_sparse_moe.experts.w13_weight" in host.call(digests)
    assert host.call(class_of_model) == "MixtralForCausalLM"


def class_of_model(scheduler):
    return type(model_of(scheduler)).__name__
