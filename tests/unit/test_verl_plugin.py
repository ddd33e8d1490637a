"""What importing veRL does to a process, and to which veRL this package answers."""

from __future__ import annotations

import ast
import importlib.util
import json
import pickle
from pathlib import Path

import pytest
from support.python import printed_by

from sglang_fp8rl import verl_plugin
from sglang_fp8rl.errors import HostError, RefitError
from sglang_fp8rl.wire.verl_deltas import check_backend

pytest.importorskip("verl")

SAID = """
import json, sys
import verl
from verl.workers.rollout import base, replica
print(json.dumps({
    "sglang": "sglang" in sys.modules,
    "adapter": base._ROLLOUT_REGISTRY["sglang", "async"],
    "loader": replica.RolloutReplicaRegistry._registry["sglang"].func.__module__,
}))
"""


@pytest.mark.timeout(700)
def test_importing_verl_registers_with_it_and_imports_nothing_of_sglang():
    said = json.loads(printed_by(SAID).splitlines()[-1])
    assert not said["sglang"]
    assert said["adapter"] == verl_plugin.ADAPTER
    assert said["loader"] == "sglang_fp8rl.verl_plugin"


class VerlsOwn:
    def __init__(self, replica_rank, config):
        self.replica_rank = replica_rank


def test_a_rollout_by_this_method_is_refused_on_versions_that_can_t_serve_it():
    replica = verl_plugin.replica_class(lambda: VerlsOwn, ["verl 0.7.1 is too old"])
    assert replica(3, {"engine_kwargs": {"sglang": {}}}).replica_rank == 3
    with pytest.raises(HostError, match=r"0\.7\.1 is too old.*docs/verl\.md"):
        replica(0, {"engine_kwargs": {"sglang": {"quantization": "fp8_blockwise_online"}}})


def test_a_rollout_by_this_method_that_would_be_sent_deltas_is_refused_before_it_starts():
    ours = {"sglang": {"quantization": "fp8_blockwise_online"}}
    check_backend({"engine_kwargs": ours, "checkpoint_engine": {"backend": "nccl"}})
    check_backend({"engine_kwargs": {}, "checkpoint_engine": {"backend": "delta_sharded"}})
    with pytest.raises(RefitError, match=r"backend: veRL's delta_sharded.*naive, nccl or nixl"):
        check_backend({"engine_kwargs": ours, "checkpoint_engine": {"backend": "delta_sharded"}})


@pytest.mark.parametrize(
    ("module", "name"),
    [("async_sglang_server", "dataclasses"), ("sglang_rollout", "AsyncHttpServerAdapter")],
)
def test_what_is_replaced_in_verl_is_there(module, name):
    """By its source: importing it imports SGLang."""
    found = importlib.util.find_spec(f"verl.workers.rollout.sglang_rollout.{module}")
    source = Path(str(found.origin)).read_text()
    names = {alias.asname or alias.name for node in ast.walk(ast.parse(source))
             if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}  # fmt: skip
    assert name in names


def test_an_error_arrives_whole_in_another_process():
    error = pickle.loads(pickle.dumps(HostError("what", "value", "rule", "remedy")))
    assert isinstance(error, HostError)
    assert (str(error), error.remedy) == ("what: value; rule. remedy", "remedy")
