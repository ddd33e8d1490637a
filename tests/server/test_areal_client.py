"""AReaL 1.0.4's own requests: pause, update from disk, go on, generate."""

from __future__ import annotations

import json

import pytest
from support.engine.models import checkpoint
from support.paths import SUPPORT
from support.server.served import MODEL, NEW_TOKENS, PROMPTS, run_script, served

from sglang_fp8rl.lab.testing.server import cpu_env

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_an_update_by_areal_equals_a_fresh_server(server, checkpoint_dir):
    pytest.importorskip("areal", reason="AReaL is not installed")
    case = served(server, checkpoint_dir)
    script = str(SUPPORT / "server" / "areal_client.py")
    for which in ("second", "first"):
        path = str(checkpoint(checkpoint_dir, MODEL, which))
        command = [script, case.server.url, path, json.dumps(PROMPTS[0]), str(NEW_TOKENS)]
        result = run_script(command, env=cpu_env())
        assert result.returncode == 0, result.stderr[-4000:]
        tokens, logprobs = json.loads(result.stdout.splitlines()[-1])
        answer = case.client.generate(PROMPTS[0])["meta_info"]["output_token_logprobs"]
        assert [tokens, logprobs] == [[one[1] for one in answer], [one[0] for one in answer]]
        case.check(which)
