"""The laws of `docs/models.md`, byte for byte: every model in every layout, on real schedulers.

`contract.py` lists the cases; `--contract-results FILE` writes what passed (see `contract_table.py`).
"""

from __future__ import annotations

import random

import pytest
import torch
from block_fp8 import BLOCK_FP8_CONFIG
from support.by_definition import quantize_blockwise
from support.engine.commands import (
    addresses,
    begin,
    digests,
    end,
    plan_document,
    scribble,
    status,
    update_from_disk,
)
from support.engine.contract import CASES, DEFAULT, ENTRIES, case_id, no_forward_of
from support.engine.engine_host import EngineHost
from support.engine.generation import NEW_TOKENS, PROMPT, generate
from support.engine.models import checkpoint
from support.engine.pool import as_param, engine_key, needs_sessions
from support.engine.trainer import in_fp8

from sglang_fp8rl.lab.testing.checkpoints import save_checkpoint


def param(entry, layout):
    """Default cases and all others; those that this host refuses are skipped with its reason."""
    key = engine_key(entry.model, layout.name)
    marks = [] if case_id((entry, layout)) in DEFAULT else [pytest.mark.slow]
    if entry.refused_here():
        marks.append(pytest.mark.skip(reason=entry.refused_here()))
    return as_param(key, *marks)


pytestmark = [
    pytest.mark.engine,
    pytest.mark.parametrize("host", [param(*case) for case in CASES], indirect=True),
]


@pytest.fixture
def case(host):
    """A running engine on the first weights, and what a fresh one has and says on either."""
    return Case(host)


class Case:
    def __init__(self, host):
        self.host, self.model = host, host.model
        self.entry, self.layout = ENTRIES[host.model.name], host.key.layout
        self.fresh = {which: host.fresh(which) for which in ("first", "second")}

    def send(self, which, buckets=None, **options):
        """Update to one of the weight sets and check that it was taken."""
        state = getattr(self.model, which)
        for bucket in buckets or [list(state)]:
            self.host.send([(name, state[name]) for name in bucket], **options)

    def check(self, which):
        for rank, found in enumerate(self.host.call_all(digests)):
            fresh = self.fresh[which].digests[rank]
            wrong = [name for name in found if found[name] != fresh[name]]
            assert not wrong, (rank, wrong)
        state = self.host.call(status)
        assert state["consistent"], state["problems"]


def shuffled_buckets(names, seed, sizes):
    names, generator = list(names), random.Random(seed)
    generator.shuffle(names)
    while names:
        size = generator.choice(sizes)
        yield names[:size]
        names = names[size:]


def with_parts(modules):
    """SGLang's `fp8` asks for the parts of a fused module, not for itself."""
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    return modules + [
        f"{parent}.{part}"
        for parent, _, leaf in (module.rpartition(".") for module in modules)
        for part in parts.get(leaf, ())
    ]


def test_the_two_weight_sets_differ_in_every_weight(case):
    """Or the other tests would prove nothing."""
    both = (case.fresh[which].digests for which in ("first", "second"))
    for first, second in zip(*both, strict=True):
        weights = [name for name in first if name.endswith(("weight", "w_kc", "w_vc"))]
        assert weights
        assert all(first[name] != second[name] for name in weights)


def test_refit_equals_fresh_load_again_and_again(case):
    for which in ("second", "first", "second", "first"):
        case.send(which)
        case.check(which)


def test_buckets_of_any_size_and_order_give_the_same_bytes(case):
    for seed, sizes in enumerate([(1,), (1, 2, 3, 7)]):
        which = ("second", "first")[seed % 2]
        case.send(which, shuffled_buckets(getattr(case.model, which), seed, sizes))
        case.check(which)
    case.send("second")
    case.send("first", load_format="flattened_bucket")
    case.check("first")


def test_nothing_of_the_old_bytes_is_left(case):
    """Memory that was given back and taken again holds anything; a full update writes all of it."""
    for which in ("second", "first"):
        case.host.call_all(scribble)
        case.send(which)
        case.check(which)


def test_addresses_stay(case):
    before = case.host.call_all(addresses)
    case.send("second")
    case.send("first", shuffled_buckets(case.model.first, 5, (3,)))
    assert case.host.call_all(addresses) == before


def test_the_scheme_is_decided_once(case):
    before = [rank["plan"] for rank in case.host.call_all(status)]
    assert before == [rank["plan"] for rank in case.fresh["second"].status]
    case.send("second", shuffled_buckets(case.model.second, 3, (5,)))
    assert [rank["plan"] for rank in case.host.call_all(status)] == before
    case.send("first")
    plan = case.host.call(plan_document)  # its tensors know their modules by the same names
    decided = {row["module"]: row["scheme"] for row in plan["modules"]}
    quantized = {name: one for name, one in decided.items() if one != "high_precision"}
    tensors = [one for one in plan["tensors"].values() if one["block_size"]]
    assert {one["module"]: one["scheme"] for one in tensors} == quantized


def test_bf16_and_fp16_sources_give_the_bytes_of_their_values(case):
    for dtype in (torch.bfloat16, torch.float16):
        rounded = {name: weight.to(dtype) for name, weight in case.model.first.items()}
        case.host.send(list(rounded.items()))
        found = case.host.call_all(digests)
        case.host.send([(name, weight.float()) for name, weight in rounded.items()])
        assert case.host.call_all(digests) == found
    case.send("first")


def test_the_engine_and_the_trainer_quantize_to_the_same_bytes(case):
    """What the plan says may travel in FP8 does, with its scales; split for each rank."""
    items = in_fp8(case.host, "second")
    assert any(weight.dtype == torch.float8_e4m3fn for _, weight in items)
    for _ in range(2):  # through the loaders, and replayed
        case.host.send(items)
        case.check("second")
        case.send("first")


@needs_sessions
def test_a_session_of_buckets_equals_one_call(case):
    assert all(ok for ok, _ in case.host.call_all(begin))
    assert not case.host.call(status)["consistent"]
    case.send("second", shuffled_buckets(case.model.second, 9, (4,)))
    assert all(ok for ok, _ in case.host.call_all(end))
    case.check("second")
    case.send("first")


def test_update_from_disk_equals_fresh_load(case, checkpoint_dir):
    for which in ("second", "first"):
        path = str(checkpoint(checkpoint_dir, case.model, which))
        for success, message in case.host.call_all(update_from_disk, path):
            assert success, message
        case.check(which)


def test_a_refitted_engine_says_what_a_fresh_one_says(case):
    """Tokens and log-probabilities, every bit."""
    reason = no_forward_of(case.entry.model, case.layout)
    if reason:
        pytest.skip(reason)
    first, second = (case.fresh[which].said for which in ("first", "second"))
    assert first != second
    case.send("second", shuffled_buckets(case.model.second, 13, (6,)))
    assert case.host.say() == second
    case.send("first")
    assert case.host.say() == first


def test_quantized_offline_and_served_by_sglangs_own_fp8_gives_the_same_bytes(case, checkpoint_dir):
    """Quantized offline by our cast, served by SGLang's block-FP8 method: same bytes, same outputs."""
    if case.entry.no_native:
        pytest.skip(case.entry.no_native)
    plan = case.host.call(plan_document)
    schemes = {row["scheme"] for row in plan["modules"]}
    if "per_channel" in schemes:
        pytest.skip("SGLang's own fp8 refuses modules that are not made of whole blocks")
    state = {}
    for name, weight in case.model.first.items():
        state[name] = weight
        if plan["tensors"][name]["scheme"] == "blockwise":
            state[name], state[f"{name}_scale_inv"] = quantize_blockwise(weight)
    plain = [row["module"] for row in plan["modules"] if row["scheme"] == "high_precision"]
    config = {**BLOCK_FP8_CONFIG, **({"ignored_layers": with_parts(plain)} if plain else {})}
    path = checkpoint_dir / f"{case_id((case.entry, case.layout))}-offline"
    save_checkpoint(path, case.model.config, state, quantization_config=config)
    options = {"tp_size": case.layout.tp_size, "args": case.layout.args}
    with EngineHost(path, quantization=None, **options) as native:
        if case.fresh["first"].said is not None:
            said = native.call_all(generate, PROMPT, NEW_TOKENS)
            assert said == case.fresh["first"].said
        offline = native.call_all(digests)
        for ours, theirs in zip(case.fresh["first"].digests, offline, strict=True):
            # SGLang's own method adds KV-cache scales; every other tensor is in both.
            assert {name: theirs.get(name) for name in ours} == ours
