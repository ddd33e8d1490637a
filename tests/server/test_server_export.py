"""An exported checkpoint in plain SGLang says what the online server says."""

from __future__ import annotations

import pytest
from support.engine.exported import exported
from support.server.served import MODEL, ONE_THREAD, PROMPTS, Client, served

from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.lab.testing.outputs import ask, differences

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.usefixtures("plans_in_forks"),
    pytest.mark.xdist_group("server"),
]


def test_plain_sglang_gives_the_outputs_of_the_online_server(server, checkpoint_dir):
    expected = served(server, checkpoint_dir).expected["first"]
    native = server(exported(checkpoint_dir, MODEL.name), env=ONE_THREAD)
    assert differences(ask(Client(native.url), PROMPTS), expected) == []
    with pytest.raises(RefitError, match=r"404.*Start it with --quantization"):
        Client(native.url).plan()  # it has the plugin, but not the method
