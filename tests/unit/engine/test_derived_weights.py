"""Names that a model binds anew in an update: back in the memory that they had, or refused."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from sglang_fp8rl.errors import ConfigError, HostError, RefitError

pytest.importorskip("sglang")

from sglang_fp8rl.engine.model.derived_weights import DerivedWeights
from tools.census.toys.toy import Toy, attached, loaded, update, weights


def two_views(first, second):
    model = torch.nn.Module()
    model.a, model.b = first, second
    return model


def test_views_that_move_together_keep_their_memory_and_get_their_values():
    old = torch.zeros(4)
    model = two_views(old, old[2:])
    with DerivedWeights(model).in_place():
        new = torch.arange(8.0)
        model.a, model.b = new[2:6], new[4:6]
    assert model.a.tolist() == [2, 3, 4, 5]
    assert model.b.tolist() == [4, 5]
    assert model.a.data_ptr() == old.data_ptr()


def part(model):
    new = torch.arange(8.0)
    model.a, model.b = new[:4], new[4:]


def bind_one(model):
    model.a = torch.ones(4)


def in_a_container(memory):
    model = torch.nn.Module()
    model.a, model.kept = memory, {"b": memory}
    return model


@pytest.mark.parametrize(
    ("made", "bind"),
    [(lambda old: two_views(old, old.view(4)), part), (in_a_container, bind_one)],
    ids=["views that part", "one of a container"],
)
def test_memory_that_another_name_has_is_not_given_another_value(made, bind):
    old = torch.zeros(4)
    model = made(old)
    derived = DerivedWeights(model)
    with pytest.raises(RefitError, match="memory that another name has"), derived.in_place():
        bind(model)
    assert not old.any()


class Derives(torch.nn.Module):
    """Derives something behind every load, as models of DeepSeek's family do."""

    def __init__(self, derive):
        super().__init__()
        self.norm = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.derive = derive

    def load_weights(self, weights):
        for _, tensor in weights:
            self.norm.weight_loader(self.norm, tensor)
        self.post_load_weights()

    def post_load_weights(self):
        self.derive(self.norm)


def scale_in_place(norm):
    norm.data *= 2


def scale_by_index(norm):
    norm.data[1:].div_(3)


def scale_by_copy(norm):
    norm.data.copy_(norm.data * 2)


def scale_anew(norm):
    norm.data = norm.data * 2


def turn(norm):
    norm.data[:2] = norm.data[:2].flip(0)


def scale_past_torch(norm):
    norm.data.numpy()[:] *= 2


def start(derive):
    model = Derives(derive)
    attached(model)
    model.load_weights([("norm", torch.arange(4.0))])
    return model


@pytest.mark.parametrize(
    "derive",
    [scale_in_place, scale_by_index, scale_by_copy, scale_anew, turn, scale_past_torch],
)
def test_a_derivation_that_changes_a_weight_by_its_own_value_is_refused_at_the_start(derive):
    with pytest.raises(
        HostError, match="norm: changed each time that post_load_weights of Derives runs"
    ):
        start(derive)


def test_a_derivation_of_a_buffer_by_its_own_value_is_refused_too():
    def derive(norm):
        model.table.mul_(2)

    model = Derives(derive)
    model.register_buffer("table", torch.ones(4))
    attached(model)
    with pytest.raises(HostError, match="table: changed each time"):
        model.load_weights([("norm", torch.arange(4.0))])


def test_a_derivation_that_writes_a_weight_anew_is_none():
    model = start(lambda norm: norm.data.copy_(torch.full((4,), 3.0)))
    assert model.norm.tolist() == [3, 3, 3, 3]


class RenamesWhatIsSent(Toy):
    """As MistralLarge3: its loader renames, and what derives looks for the names that come of it."""

    names = ("sent.a", "sent.b")

    def __init__(self) -> None:
        super().__init__()
        self.turned = torch.zeros(4, 6)

    def shapes(self):
        return dict.fromkeys(self.names, (6, 4))

    def load_weights(self, sent):
        served = [(f"{name[-1]}.weight", one) for name, one in sent]
        super().load_weights(served)
        self.post_load_weights([name for name, _ in served])

    def post_load_weights(self, weight_names=None):
        if "a.weight" in (weight_names or ["a.weight"]):
            self.turned = self.a.weight.data.t().contiguous()


def test_what_is_derived_by_names_that_a_loader_made_follows_a_replayed_bucket():
    refit = loaded(RenamesWhatIsSent, 0)
    for seed in (1, 2, 3):  # the first is learnt
        for name, one in weights(refit.model, seed).items():
            update(refit, {name: one})
        assert torch.equal(refit.model.turned, refit.model.a.weight.t())


def test_all_that_a_model_derives_by_renamed_names_is_renewed_by_the_proof():
    refit = loaded(RenamesWhatIsSent, 0)
    refit.model.turned.zero_()
    assert refit.derived.renewed(refit.names.known) == ["turned"]


class TurnedByItsLoader(Toy):
    """As Inkling's shared experts: a loader that is given the parameter itself turns it into a buffer as well."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turned", torch.zeros(4, 6), persistent=False)
        self.a.weight.weight_loader = self.load_a

    def load_a(self, parameter, loaded_weight):
        parameter.data.copy_(loaded_weight)
        if parameter is self.a.weight:
            self.process_weights_after_loading()

    def process_weights_after_loading(self):
        self.turned.copy_(self.a.weight.data.t())


class TakesAnything(TurnedByItsLoader):
    def process_weights_after_loading(self, *args, **kwargs):
        super().process_weights_after_loading()


@pytest.mark.parametrize("kind", [TurnedByItsLoader, TakesAnything])
@pytest.mark.parametrize("replays", [True, False])
def test_what_is_derived_behind_the_start_is_derived_behind_every_update(replays, kind):
    refit = loaded(kind, 0, replay=replays)
    refit.model.process_weights_after_loading()  # SGLang's loader of models, once
    refit.note_loaded()
    place = refit.model.turned.data_ptr()
    for seed in (1, 2, 3):
        update(refit, weights(refit.model, seed))
        assert torch.equal(refit.model.turned, weights(refit.model, seed)["a.weight"].t())
        assert refit.model.turned.data_ptr() == place


class RoutesAsGemma4(Toy):
    """SGLang's own router: at its first pass it folds its scale into a norm, once and for all."""

    names = ("a.weight", "router.scale", "router.proj.weight")

    def __init__(self) -> None:
        super().__init__()
        from sglang.srt.models.gemma4_causal import Gemma4Router

        sizes = {"hidden_size": 8, "num_experts": 4, "rms_norm_eps": 1e-6}
        self.router = Gemma4Router(SimpleNamespace(**sizes)).requires_grad_(False)


@pytest.mark.parametrize("replays", [True, False])
def test_what_is_folded_at_the_first_pass_is_folded_again_behind_every_update(replays):
    refit = loaded(RoutesAsGemma4, 0, replay=replays)
    refit.note_loaded()
    router = refit.model.router
    router.fuse_scale()  # as the first pass does
    for seed in (1, 2, 3):  # the first is learnt
        update(refit, weights(refit.model, seed))
        folded = weights(refit.model, seed)["router.scale"] * router.root_size
        assert torch.equal(router.norm.weight, folded)


class WantsItsLayer(Toy):
    def process_weights_after_loading(self, layer):
        raise AssertionError(layer)


def test_a_method_that_wants_arguments_is_not_called():
    refit = loaded(WantsItsLayer, 0)
    refit.note_loaded()
    update(refit, weights(refit.model, 1))


class IsGivenItsDtype(TurnedByItsLoader):
    def process_weights_after_loading(self, dtype=torch.float32, *, scale):
        self.turned.copy_(self.a.weight.data.t() * scale)

    def load_a(self, parameter, loaded_weight):
        parameter.data.copy_(loaded_weight)


def test_a_method_that_was_called_with_arguments_is_named_as_unproven():
    refit = loaded(IsGivenItsDtype, 0)
    refit.note_loaded()
    assert not refit.derived.kept_copies.unproven
    refit.model.process_weights_after_loading(scale=2.0)
    refit.note_loaded()
    assert list(refit.derived.kept_copies.unproven) == ["process_weights_after_loading"]


def test_a_loader_that_turns_rows_for_its_own_parameter_only_is_refused_at_the_start():
    model = Toy()
    model.a._w13_gate_up_contiguous = True  # as Inkling's shared experts with LoRA's triton_v2
    with pytest.raises(ConfigError, match=r"a: rows of gate and up .* without LoRA"):
        attached(model)


def test_sglangs_inkling_still_says_so_by_that_name():
    mlp = pytest.importorskip(
        "sglang.srt.models.inkling_common.dense_mlp", reason="this SGLang has no Inkling"
    )
    source = inspect.getsource(mlp)
    if "is self.w13_weight" not in source:
        pytest.skip("this SGLang has no loader of it that asks")
    assert "self._w13_gate_up_contiguous and param is self.w13_weight" in source


class DerivesBehindItsLoad(Toy):
    def load_weights(self, sent):
        super().load_weights(sent)
        self.post_load_weights()


class DecodesAsKimiK3(DerivesBehindItsLoad):
    """SGLang's own preparation of the arguments of Kimi-K3's decoding kernel, of 12 heads of 128 (eight ranks)."""

    names = ("attn.conv_weights", "attn.A_log", "attn.dt_bias", "o_norm.weight")

    def __init__(self) -> None:
        super().__init__()
        seg = 12 * 128
        shapes = {"conv_weights": (3 * seg, 4), "A_log": (1, 1, 12, 1), "dt_bias": (seg,)}
        self.attn, self.o_norm = torch.nn.Module(), torch.nn.Module()
        for name, shape in shapes.items():
            self.attn.register_parameter(name, frozen(shape))
        self.attn.bias = None
        self.o_norm.register_parameter("weight", frozen((128,)))
        self.o_norm.eps = 1e-6

    def post_load_weights(self):
        kimi_k3 = pytest.importorskip(
            "sglang.srt.models.kimi_k3", reason="this SGLang has no Kimi-K3"
        )
        kimi_k3.KimiK3DeltaAttention._prepare_fused_decode(self)


def frozen(shape):
    return torch.nn.Parameter(torch.zeros(shape), requires_grad=False)


@pytest.mark.parametrize("replays", [True, False])
def test_arguments_of_a_kernel_keep_their_memory_and_follow_every_update(replays):
    refit = loaded(DecodesAsKimiK3, 0, replay=replays)
    refit.note_loaded()
    captured = refit.model.attn._k3_fused_decode_args  # what a CUDA graph reads from then on
    for seed in (1, 2, 3):  # the first is learnt
        sent = weights(refit.model, seed)
        update(refit, sent)
        assert refit.model.attn._k3_fused_decode_args is captured
        parts = sent["attn.conv_weights"].t().split(12 * 128, dim=1)
        expected = (
            *parts,
            torch.zeros(3 * 12 * 128),
            sent["attn.A_log"].reshape(-1),
            sent["o_norm.weight"],
        )
        for held, one in zip(captured, expected, strict=False):
            assert torch.equal(held, one)
    assert captured[4].data_ptr() == refit.model.attn.A_log.data_ptr()


class WeighsResidualsAsKimiK3(DerivesBehindItsLoad):
    """SGLang's own products of norms and projections, which it makes where it finds none."""

    names = ("proj.weight", "norm.weight", "other.weight")

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.norm, self.other = (torch.nn.Module() for _ in range(3))
        for module, shape in ((self.proj, (1, 8)), (self.norm, (8,)), (self.other, (8,))):
            module.register_parameter("weight", frozen(shape))

    def post_load_weights(self):
        residual = pytest.importorskip(
            "sglang.srt.layers.attn_residual", reason="this SGLang has no Kimi-K3"
        )
        for dtype in (torch.bfloat16, torch.float32):
            residual.get_cw(self.proj, self.norm, dtype=dtype)


@pytest.mark.parametrize("replays", [True, False])
def test_a_cache_that_a_derivation_fills_once_keeps_its_memory_and_follows_every_update(replays):
    refit = loaded(WeighsResidualsAsKimiK3, 0, replay=replays)
    refit.note_loaded()
    captured = dict(refit.model.proj._attn_res_cw_cache)
    for seed in (1, 2, 3):  # the first is learnt
        sent = weights(refit.model, seed)
        update(refit, sent)
        product = sent["proj.weight"][0] * sent["norm.weight"]
        for dtype, one in refit.model.proj._attn_res_cw_cache.items():
            assert one is captured[dtype]
            assert torch.equal(one, product.to(dtype))


def bound_anew(name, bind):
    """Arguments by that name, and what they are when a derivation has bound them anew, as `bind` makes them."""
    model, held = Derives(lambda norm: None), (torch.zeros(4), torch.ones(4), 1.0)
    setattr(model, name, held)
    derived = DerivedWeights(model)
    derived.attach()
    model.post_load_weights()  # behind the load
    derived.note_loaded([])
    model.derive = lambda norm: setattr(model, name, bind(*held))
    with derived.in_place():
        model.post_load_weights()
    return held, getattr(model, name)


@pytest.mark.parametrize(
    ("name", "bind"),
    [
        ("_k3_fused_decode_args", lambda a, b, c: (a + 1, b.double(), c)),
        ("_k3_fused_decode_args", lambda a, b, c: (a + 1, b)),
        ("_k3_fused_decode_args", lambda a, b, c: [a + 1, b, c]),
        ("_k3_fused_decode_args", lambda a, b, c: (a + 1, b, 2.0)),
        ("_k3_fused_decode_args", lambda a, b, c: None),
        ("any_other_tuple", lambda a, b, c: (a + 1, b, c)),
    ],
    ids=["dtype", "shorter", "list", "number", "none", "name"],
)
def test_what_is_not_alike_or_not_known_by_its_name_stays_as_the_derivation_made_it(name, bind):
    held, left = bound_anew(name, bind)
    assert left is not held
    assert [held[0].tolist(), held[1].tolist()] == [[0] * 4, [1] * 4]
