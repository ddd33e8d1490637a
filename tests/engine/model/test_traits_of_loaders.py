"""Loaders that do more than copy, on a real engine: a fully updated one holds the bytes of a fresh one.

The small models are the census's (`tools/census`), which judges every class in a process of its own; here the
classes with a trait run in a scheduler. Apertus (scalars and buffers) is held to the whole contract.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.engine.commands import begin, digests, end, forget_buckets, status, update
from support.engine.engine_host import EngineHost
from support.engine.pool import needs_sessions

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.xdist_group("traits")]

REPOSITORY = Path(__file__).parents[3]
# Class, to whether all of it is replayed. What its loader does that a plain copy is not:
TRAITS = {
    "KimiVLForConditionalGeneration": True,  # MLA of a model inside the model
    "Gemma4ForCausalLM": True,  # a scalar of each layer; a router that folds a scale
    "Mistral3ForConditionalGeneration": True,  # Pixtral's vision tower is written without loaders
    "Gemma2ForCausalLM": True,  # norms keep `weight + 1`
    "PersimmonForCausalLM": False,  # copies a fused tensor to take it apart
    "OPTForCausalLM": False,  # two tensors at one place
}
ARGS = ("--max-total-tokens", "1024", "--context-length", "512")
# Gemma 4 asks for one of SGLang's GPU backends by name; nothing is generated here.
ATTENTION = {"Gemma4ForCausalLM": ("--attention-backend", "triton")}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A folder for each class, with three weight sets in which every tensor differs."""
    directory = tmp_path_factory.mktemp("traits")
    command = [sys.executable, "-m", "tools.census.checkpoints", str(directory), *TRAITS]
    made = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=540)
    assert made.returncode == 0, made.stderr[-4000:]
    return directory


@pytest.mark.timeout(900)  # the first one makes all checkpoints
@pytest.mark.parametrize("architecture", TRAITS)
def test_a_refit_equals_a_fresh_load_whatever_the_loader_does(architecture, checkpoints):
    second, third, expected = _updates(checkpoints, architecture)
    with _engine(checkpoints, architecture, 0) as host:
        assert host.call(digests) != expected
        host.call(forget_buckets)
        for items in (second, third):  # recorded, then replayed
            host.send(items)
        assert _differences(host.call(digests), expected) == []
        found = host.call(status)
        assert found["consistent"], found["problems"]
        replay = found["replay"]
        is_replayed = replay["calls"] > 0 and not replay["native_tensors"]
        assert is_replayed == TRAITS[architecture], replay
        assert is_replayed or replay["native_reasons"]


@needs_sessions
@pytest.mark.parametrize("architecture", ["KimiVLForConditionalGeneration", "Gemma4ForCausalLM"])
def test_a_session_of_buckets_equals_a_fresh_load(architecture, checkpoints):
    second, third, expected = _updates(checkpoints, architecture)
    with _engine(checkpoints, architecture, 0) as host:
        for items in (second, third):
            for step in (host.call(begin), *_sent(host, items, 5), host.call(end)):
                assert step[0], step[1]
        assert _differences(host.call(digests), expected) == []
        assert host.call(status)["consistent"]


def _updates(checkpoints, architecture):
    """Two sets to send, and the bytes of a start on the latter."""
    sets = [load_file(_set(checkpoints, architecture, at)) for at in (1, 2)]
    with _engine(checkpoints, architecture, 2) as fresh:
        return *(list(one.items()) for one in sets), fresh.call(digests)


def _sent(host, items, size):
    for at in range(0, len(items), size):
        yield host.call(update, items[at : at + size], flush_cache=False)


def _engine(checkpoints: Path, architecture: str, at: int) -> EngineHost:
    args = (*ARGS, *ATTENTION.get(architecture, ()))
    return EngineHost(_set(checkpoints, architecture, at).parent, args=args)


def _set(checkpoints: Path, architecture: str, at: int) -> Path:
    return checkpoints / architecture / str(at) / "model.safetensors"


def _differences(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    return sorted(
        name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)
    )
