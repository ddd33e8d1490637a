"""What is measured is what is served: operands, products, suffixes, sums."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.eval.sensitivity_model import PROMPTS, small_model, small_plan, small_weights

from sglang_fp8rl import dequantize, quantize_blockwise, quantize_per_channel
from sglang_fp8rl.errors import EvaluationError
from sglang_fp8rl.lab.cpu_platform.cpu_linear import exact_product, quantize_per_token_group
from sglang_fp8rl.lab.sensitivity.divergence import CleanRun, _kl_sum
from sglang_fp8rl.lab.sensitivity.noise import FitObserver
from sglang_fp8rl.lab.sensitivity.quantized_products import (
    Operand,
    Products,
    ServedArithmetic,
    served_activation,
    served_weight,
)
from sglang_fp8rl.lab.sensitivity.reference import reference_of
from sglang_fp8rl.lab.sensitivity.samples import Sample, batches, sample_answers
from sglang_fp8rl.lab.sensitivity.served_modules import served_modules
from sglang_fp8rl.lab.sensitivity.sqnr import sqnr_db

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
SAMPLES = [Sample(tuple(prompt)) for prompt in PROMPTS]
QKV = "model.layers.1.self_attn.qkv_proj"


class Small:
    def __init__(self, tmp, family):
        self.weights = small_weights(family)
        self.plan = small_plan(family)
        self.modules = served_modules(self.plan)
        self.model = small_model(self.weights, family, tmp)
        self.reference = reference_of(self.model, self.plan, self.modules)

    def clean(self, tokens_at_once=64, samples=SAMPLES):
        return CleanRun(self.model, self.reference.layers, batches(samples, tokens_at_once, CPU))

    def quantized(self, *names, operand=Operand.BOTH):
        arithmetic = ServedArithmetic(names, self.plan, operand=operand)
        return Products(self.reference.weights, arithmetic)


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def small(request, tmp_path_factory):
    return Small(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Small(tmp_path_factory.mktemp("llama"), "llama")


def test_operands_are_the_bytes_of_the_reference():
    weight = torch.randn(300, 384, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    rounding = {"pow2_scale": False, "round_to_bf16": True}
    for block, cast in (((128, 128), quantize_blockwise), ((1, 384), quantize_per_channel)):
        expected = dequantize(*cast(weight), dtype=torch.float32)
        assert torch.equal(served_weight(weight, block, rounding, "w"), expected)
    x = torch.randn(2, 5, 384, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    for group in (128, 384):
        codes, scale = quantize_per_token_group(x.reshape(10, 384), group)
        wide = codes.float().reshape(10, -1, group) * scale[:, :, None]
        assert torch.equal(served_activation(x, group), wide.reshape(x.shape))


def test_products_are_those_of_the_served_kernels(llama):
    """Against the CPU platform's exact sums: what is left is FP32 rounding."""
    generator = torch.Generator().manual_seed(3)
    for module in llama.modules[:4]:
        name = module.tensors[0]
        weight = llama.model.get_parameter(name)
        x = torch.randn(7, weight.shape[1], generator=generator).bfloat16().float()
        ours = ServedArithmetic([module.name], llama.plan)(module, x, weight)
        codes, scale = quantize_per_token_group(x, module.block[1])
        if module.scheme == "blockwise":
            q, s = quantize_blockwise(weight.detach())
        else:
            q, s = quantize_per_channel(weight.detach())
        exact = exact_product(codes, q, s, x_scale=scale)
        assert sqnr_db(exact, ours) > 120
    assert {module.scheme for module in llama.modules[:4]} == {"blockwise", "per_channel"}


def test_activations_that_the_plan_leaves_in_bf16_are_not_quantized(llama):
    module = replace(llama.modules[0], activations="bf16")
    weight = llama.model.get_parameter(module.tensors[0])
    x = torch.randn(7, weight.shape[1], generator=torch.Generator().manual_seed(5))
    arithmetic = [
        ServedArithmetic([module.name], llama.plan, operand=operand)
        for operand in (Operand.BOTH, Operand.WEIGHTS)
    ]
    both, weights = (one(module, x, weight) for one in arithmetic)
    assert torch.equal(both, weights)
    assert not torch.equal(both, arithmetic[0](llama.modules[0], x, weight))


def test_a_suffix_of_the_clean_run_gives_the_divergence_of_the_whole(small):
    clean = small.clean()
    for module in small.modules:
        first = small.reference.first_layers[module.name]
        assert first == module.layer
        whole = clean.divergence(0, small.quantized(module.name))
        assert min(whole) > 0
        assert clean.divergence(first, small.quantized(module.name)) == whole
    for first in range(len(small.reference.layers) + 1):
        assert clean.divergence(first, small.quantized()) == [0.0] * len(SAMPLES)


def test_a_module_s_weights_are_all_of_its_parts_and_nothing_else(small, tmp_path):
    """Against a model whose weights were replaced by hand."""
    for at, module in enumerate(small.modules[:5]):
        weights = dict(small.weights)
        for name in module.tensors:
            cast = quantize_blockwise if module.scheme == "blockwise" else quantize_per_channel
            weights[name] = dequantize(*cast(weights[name]), dtype=torch.float32)
        family = small.plan.document["model"]["model_type"]
        replaced = small_model(weights, family, tmp_path / str(at))
        replaced.set_experts_implementation("eager")
        ids = torch.tensor([PROMPTS[1]])
        with torch.inference_mode():
            expected = replaced(ids).logits
            with small.quantized(module.name, operand=Operand.WEIGHTS):
                assert torch.equal(small.model(ids).logits, expected)
            with small.quantized(module.name):
                assert not torch.equal(small.model(ids).logits, expected)
            assert not torch.equal(small.model(ids).logits, expected)


def test_the_divergence_is_the_kullback_leibler_sum_over_the_vocabulary(llama):
    names = [module.name for module in llama.modules]
    sums = llama.clean().divergence(0, llama.quantized(*names))
    for sample, found in zip(SAMPLES, sums, strict=True):
        ids = torch.tensor([sample.ids])
        with torch.inference_mode():
            clean = llama.model(ids).logits[0].double().log_softmax(-1)
            with llama.quantized(*names):
                changed = llama.model(ids).logits[0].double().log_softmax(-1)
        expected = torch.nn.functional.kl_div(changed, clean, reduction="sum", log_target=True)
        assert found == pytest.approx(expected.item(), rel=1e-3)


def test_neither_batches_nor_padding_nor_neighbours_change_a_sample(llama):
    samples = [*SAMPLES, Sample((1, 2), (3, 4, 5, 6, 7, 8))]
    together = llama.clean(1000, samples).divergence(1, llama.quantized(QKV))
    for tokens in (1, 9):
        apart = llama.clean(tokens, samples).divergence(1, llama.quantized(QKV))
        # Sums in another order flip a code now and then.
        assert apart == pytest.approx(together, rel=0.05)


def test_only_positions_that_predict_the_answer_count(llama):
    ids, prompt = (5, 9, 2, 33, 34), 2
    with torch.inference_mode():
        clean = llama.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        with llama.quantized(QKV):
            changed = llama.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    each = (clean.exp() * (clean - changed)).sum(-1).tolist()
    samples = [Sample(ids[:prompt], ids[prompt:]), Sample(ids)]
    # Position 1 gives the first token of the answer, position 3 its last; 4 is behind it.
    answer, whole = llama.clean(64, samples).divergence(0, llama.quantized(QKV))
    assert [sample.tokens for sample in samples] == [3, 5]
    assert answer == pytest.approx(sum(each[1:4]), rel=1e-2)
    assert whole == pytest.approx(sum(each), rel=1e-2)


def test_the_fingerprint_is_of_every_value(llama):
    before = reference_of(llama.model, llama.plan, llama.modules).fingerprint
    assert before == llama.reference.fingerprint
    weight = llama.model.get_parameter("model.norm.weight")
    with torch.no_grad():
        weight[3] += 0.5
        changed = reference_of(llama.model, llama.plan, llama.modules).fingerprint
        weight[3] -= 0.5
    assert changed != before == reference_of(llama.model, llama.plan, llama.modules).fingerprint


def test_measuring_leaves_the_model_as_it_was(llama):
    before = {name: value.clone() for name, value in llama.model.state_dict().items()}
    clean = llama.clean()
    with pytest.raises(KeyboardInterrupt), Products(llama.reference.weights, _interrupt):
        clean.divergence(2, llama.quantized(QKV))
    clean.divergence(2, llama.quantized(QKV))
    for name, value in llama.model.state_dict().items():
        assert torch.equal(value, before[name])
    for layer in llama.reference.layers:
        assert "forward" not in vars(layer)
        assert not layer._forward_hooks
    assert clean.divergence(0, llama.quantized()) == [0.0] * len(SAMPLES)


def _interrupt(module, x, weight):
    raise KeyboardInterrupt


def drawn_answers(model, prompts, **settings):
    return [one for each in prompts for one in sample_answers(model, each, samples=4, **settings)]


def test_answers_are_samples_of_the_model_that_end_where_it_ends(llama):
    def draw(seed):
        return drawn_answers(llama.model, PROMPTS[:3], new_tokens=24, seed=seed)

    first, again, other = draw(0), draw(0), draw(1)
    assert first == again != other
    assert [sample.prompt for sample in first[::4]] == [tuple(p) for p in PROMPTS[:3]]
    end = llama.model.generation_config.eos_token_id
    for sample in [*first, *other]:
        assert 1 <= len(sample.answer) <= 24
        assert end not in sample.answer[:-1]
        assert len(sample.answer) == 24 or sample.answer[-1] == end
    assert drawn_answers(llama.model, PROMPTS, new_tokens=0, seed=0) == SAMPLES


@pytest.mark.parametrize(
    ("name", "value"), [("repetition_penalty", 100.0), ("min_p", 0.9), ("no_repeat_ngram_size", 1)]
)
def test_answers_take_over_nothing_of_the_checkpoint_s_sampling(llama, monkeypatch, name, value):
    config = llama.model.generation_config
    monkeypatch.setattr(llama.model, "generation_config", config)  # put back at the end
    plain = drawn_answers(llama.model, PROMPTS[:1], new_tokens=24, seed=0)
    own = type(config)(**config.to_dict() | {name: value})
    monkeypatch.setattr(llama.model, "generation_config", own)
    assert drawn_answers(llama.model, PROMPTS[:1], new_tokens=24, seed=0) == plain


def test_no_number_in_the_clean_model_is_no_agreement():
    broken = torch.full((1, 4), torch.nan)
    assert math.isnan(_kl_sum(broken, torch.zeros(1, 4)))
    impossible = torch.tensor([[0.0, -torch.inf]])
    assert _kl_sum(impossible, impossible) == 0


def test_an_outlier_channel_is_named_and_costs_the_row_more_than_the_block(llama):
    """One input channel a thousand times the others: a scale for the whole row loses the rest."""
    down = next(one for one in llama.modules if one.name == "model.layers.0.mlp.down_proj")
    observer = FitObserver([down.name], llama.plan)
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(4))
    x[:, 200] *= 1000
    weight = llama.model.get_parameter(down.tensors[0]).detach()
    for part in x.split(4):
        observer(down, part, weight)
    fit = observer.fits()[down.name]
    assert fit.outliers[0][0] == 200
    assert fit.outliers[0][1] > 100 > fit.outliers[1][1]
    assert fit.activation_db == fit.activation_groups_db
    exact = served_activation(x, 128)
    assert fit.activation_groups_db == pytest.approx(sqnr_db(x, exact), abs=1e-6)
    assert fit.weight_db == pytest.approx(
        sqnr_db(weight, served_weight(weight, (128, 128), llama.plan.rounding, "w")), abs=1e-6
    )


def test_a_module_that_transformers_does_not_have_is_an_error(llama):
    lost = small_plan("llama").as_dict()
    tensors = dict(lost["tensors"])
    name = "model.layers.0.mlp.down_proj.weight"
    tensors["model.layers.0.mlp.elsewhere.weight"] = tensors.pop(name)
    plan = type(llama.plan)(lost, {**llama.plan.tensors}, "")
    del plan.tensors[name]
    with pytest.raises(EvaluationError, match=r"layers\.0\.mlp\.down_proj"):
        reference_of(llama.model, plan, llama.modules)
