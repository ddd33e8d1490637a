"""The server that tests of this folder share, and who sends to it; a file may have a fixture of its own instead."""

from __future__ import annotations

import pytest


@pytest.fixture
def case(server, checkpoint_dir):
    """One server on its first weights, as `support.server.served.Served`."""
    from support.server.served import served

    return served(server, checkpoint_dir)


@pytest.fixture(params=["session", "no-session"])
def client(request, case):
    """A `RefitClient` of that server, which opens sessions or knows none."""
    from support.server.served import HAS_SESSIONS, Client, ClientWithoutSessions

    if request.param == "session" and not HAS_SESSIONS:
        pytest.skip("this SGLang has no sessions")
    made = Client if request.param == "session" else ClientWithoutSessions
    return made(case.server.url)
