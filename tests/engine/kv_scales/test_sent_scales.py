"""`kv_scales: sent`: scales that come with the weights, under the names of those who send them."""

from __future__ import annotations

import math
from functools import cached_property
from types import SimpleNamespace

import pytest
import torch
from support.engine.commands import digests, status
from support.engine.kv_cases import LONGER, exponents_of, kv_status, with_fp8_cache
from support.engine.kv_commands import (
    FP8_CACHE,
    exponents,
    flush,
    generate_cached,
    kv_of,
    poison,
)
from support.engine.models import MODELS, Model
from support.engine.options import overridden
from support.engine.pool import engine_key, on, runs_on

from sglang_fp8rl.engine.kv_scales.sent_scales import SentScales

pytestmark = pytest.mark.engine

SENT = (*FP8_CACHE, *overridden(kv_scales="sent"))
UNIT = (*FP8_CACHE, *overridden(kv_scales="unit"))


def as_nemo_rl(scales, shape=(1,)):
    """Per layer the scales of k and v, under the names that NeMo-RL sends; q's too."""
    found = {}
    for layer, (k, v) in enumerate(scales):
        attention = f"model.layers.{layer}.self_attn"
        for name, value in (("attn.q_scale", k), ("k_scale", k), ("v_scale", v)):
            found[f"{attention}.{name}"] = torch.tensor(value).reshape(shape)
    return found


class Scaled(Model):
    """Weights with scales beside them, as NeMo-RL sends and compressed-tensors saves them."""

    @cached_property
    def first(self):
        return MODELS[self.family].first | as_nemo_rl([(0.3, 2.0), (5.0, 0.01)])

    @cached_property
    def second(self):
        return MODELS[self.family].second | as_nemo_rl([(0.6, 0.02), (0.25, 0.2501)])


# None so small that a value is above 448: e4m3 makes it NaN with the torch of 0.5.16.
EXPONENTS_OF_SECOND = [(0, -5), (-2, -1)]
SCALED = Scaled("qwen3-scaled", "qwen3")


def with_sent_scales(model, layout="tp1"):
    return engine_key(model, layout, SENT, "sent", radix_cache=True)


def unknown_and_kept(host):
    sent = kv_status(host)["sent"]
    return [name.split(".")[2] for name in sent["unknown"]], [
        name.split(".")[2] for name in sent["kept"]
    ]


@on(with_sent_scales(SCALED), slow=(with_sent_scales(SCALED, "tp2"),))
def test_a_refit_ends_with_the_exponents_the_bytes_and_the_words_of_a_fresh_start(host):
    items = list(host.model.second.items())
    scales = [item for item in items if item[0].endswith("_scale")]
    weights = [item for item in items if not item[0].endswith("_scale")]
    fresh, first = host.fresh("second"), host.call_all(exponents)
    assert first != [exponents_of(one) for one in fresh.status]
    for buckets in ([items[at::3] for at in range(3)], [weights, scales], [scales, weights]):
        for _ in range(2):  # recorded, then replayed
            host.update_to("first")
            assert host.call_all(exponents) == first
            for which, bucket in enumerate(buckets):
                host.send(bucket, "flattened_bucket", which == len(buckets) - 1)
            found = host.call_all(exponents)
            assert found == [exponents_of(one) for one in fresh.status]
            assert found[0] == EXPONENTS_OF_SECOND
            assert host.call_all(digests) == fresh.digests
    assert host.say() == fresh.said
    assert host.call(status)["replay"]["calls"] > 0
    assert unknown_and_kept(host) == ([], [])
    assert host.call(status)["last_refit"]["outcome"] == "ok"


@on(with_sent_scales("qwen3"))
def test_a_layer_whose_scale_did_not_come_keeps_its_last_one_and_is_named(host):
    assert host.call(exponents) == [(0, 0), (0, 0)]
    assert unknown_and_kept(host) == (["0", "1"], [])
    assert kv_status(host)["layers"][0]["keys"]["largest"] is None
    scales = as_nemo_rl([(0.6, 0.02), (0.25, 0.2501)], shape=())
    host.send(list((host.model.second | scales).items()))
    assert host.call(exponents) == EXPONENTS_OF_SECOND
    side = kv_status(host)["layers"][0]["keys"]
    assert side["largest"] == pytest.approx(0.6 * 448)
    assert side["head_room"] == round(-math.log2(0.6), 3)
    assert unknown_and_kept(host) == ([], [])
    without = {name: one for name, one in scales.items() if ".1." not in name}
    without["model.layers.0.self_attn.k_scale"] = torch.tensor([16.0])
    host.send(list((host.model.first | without).items()))
    assert host.call(exponents) == [(4, -5), EXPONENTS_OF_SECOND[1]]
    assert unknown_and_kept(host) == ([], ["1"])
    host.in_doubt = True  # what was sent stays known


@on(with_sent_scales(SCALED))
def test_a_scale_is_older_than_the_weights_if_it_did_not_come_in_their_refit(host):
    """Also where the refit that brought it chose no exponents: no flush was asked for."""
    host.send(list(host.model.second.items()), None, False)
    host.send(list(MODELS["qwen3"].first.items()))
    assert unknown_and_kept(host) == ([], ["0", "1"])


@on(with_sent_scales(SCALED))
def test_two_values_of_one_scale_in_two_calls_of_a_refit_are_refused_by_both_names(host):
    weights = list(MODELS["qwen3"].second.items())
    host.send([*weights[:9], (NAMES[0], torch.tensor([4.0]))], None, False)
    host.refuses([*weights[9:], (NAMES[1], torch.tensor([0.5]))], NAMES[1], f"{NAMES[0]} 4.0")


@on(with_sent_scales(SCALED))
def test_scales_alone_move_exponents_and_no_prefix_survives_it(host):
    assert host.call(generate_cached, LONGER, 4)[1] == 0
    assert host.call(generate_cached, LONGER, 4)[1] > 0
    host.send(list(as_nemo_rl([(8.0, 0.1), (3.0, 1.0)]).items()))
    assert host.call(exponents) == [(3, -3), (2, 0)]
    host.call(poison)
    again, hit = host.call(generate_cached, LONGER, 4)
    assert hit == 0
    assert all(math.isfinite(value) for value in again[1])


@on(with_sent_scales(SCALED))
@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_what_is_no_scale_is_refused_by_name_and_the_last_one_stays(host, value):
    good = as_nemo_rl([(8.0, 0.1), (3.0, 1.0)])
    host.send(list(good.items()))
    name = "model.layers.1.self_attn.v_scale"
    items = [*list(good.items())[:3], (name, torch.tensor([value]))]
    host.refuses(items, name, str(value), "finite and larger than zero", "Calibrate again")
    host.call(flush)
    assert host.call(exponents) == [(3, -3), (2, 0)]


@on(with_sent_scales(SCALED))
def test_scales_of_other_shapes_and_of_layers_that_are_not_there_are_refused(host):
    name = "model.layers.1.self_attn.k_scale"
    host.refuses([(name, torch.ones(4))], "shape (4,)")
    host.refuses([(name, torch.ones(1, dtype=torch.int32))], "torch.int32")
    other = name.replace(".1.", ".7.")
    host.refuses([(other, torch.ones(1))], other, "no layer of that name")


@on(with_fp8_cache("qwen3"))
def test_a_server_that_chooses_itself_does_without_them_and_says_so(host):
    before = host.call(exponents)
    assert kv_status(host)["sent"] is None
    scales = as_nemo_rl([(8.0, 0.1), (3.0, math.nan)])
    for _ in range(2):  # recorded, then replayed
        host.send(list((host.model.first | scales).items()))
    assert host.call(exponents) == before
    assert kv_status(host)["sent"] == {
        "ignored": 6,
        "reason": "kv_scales is 'certified': this server chooses scales itself",
    }
    assert host.call(status)["last_refit"]["outcome"] == "ok"
    host.refuses([("model.layers.0.self_attn.k_scales", torch.ones(1))], "no parameter takes")


@on(engine_key("qwen3"), engine_key("qwen3", "tp1", UNIT, "unit"))
def test_a_server_that_scales_nothing_refuses_them_with_the_remedy(host):
    items = list(as_nemo_rl([(8.0, 0.1), (3.0, 1.0)]).items())
    host.refuses(items, "model.layers.0.self_attn.k_scale", "kv_scales='sent'")


@runs_on("qwen3")
def test_a_checkpoint_with_scales_is_served_where_nothing_is_scaled(engine_pool):
    with engine_pool.lent(engine_key(SCALED)) as host:
        host.send(list(host.model.second.items()))
        assert host.call(status)["last_refit"]["outcome"] == "ok"
        assert host.call(status)["kv_scales"] is None
        assert not host.call(_is_folded)


def _is_folded(scheduler):
    return kv_of(scheduler) is not None


NAMES = ("model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.attn.k_scale")


@pytest.mark.parametrize(
    ("first", "second"), [NAMES, NAMES[::-1]], ids=["outer first", "inner first"]
)
def test_two_names_of_one_scale_have_one_value_in_all_calls_of_a_refit(first, second):
    scales = SentScales(lambda attention: attention)
    layers = [SimpleNamespace(name="model.layers.0.self_attn")]

    def errors(name, value):
        received = scales.receive({name: torch.tensor([value])}, is_serving=True)
        return list(received.errors)

    assert errors(first, 4.0) == []
    assert errors(second, 0.5) == [second]
    assert scales.largest(layers)[0, 0] == 4.0 * 448
    assert errors(second, 4.0) == []
    scales.begin_refit()
    assert errors(second, 0.5) == []
    assert scales.largest(layers)[0, 0] == 0.5 * 448


def test_two_names_of_one_scale_have_one_value_or_neither_is_taken():
    scales = SentScales(lambda attention: attention)
    layers = [SimpleNamespace(name="model.layers.0.self_attn")]
    for values, errors, held in (
        ((2.0, 2.0), [], 2.0),
        ((4.0, 0.5), [NAMES[1]], 2.0),
        ((0.5, 0.5), [], 0.5),
    ):
        sent = {name: torch.tensor([one]) for name, one in zip(NAMES, values, strict=True)}
        received = scales.receive(sent, is_serving=True)
        assert list(received.errors) == errors
        assert all(NAMES[0] in received.errors[name] for name in errors)
        assert scales.largest(layers)[0, 0] == held * 448
