"""The server that tests of this folder share, and who sends to it; a file may have a fixture of its own instead."""

from __future__ import annotations

import pytest


@pytest.fixture
def case(server, checkpoint_dir):
    """One server on its first weights, as `support.server.served.Served`."""
    from support.server.served import served

    return served(server, checkpoint_dir)


@pytest.fixture(params=[True, False], ids=["session", "no-session"])
def session(request):
    """Whether a refit is in a session; True only where the host has them."""
    from support.server.served import HAS_SESSIONS

    if request.param and not HAS_SESSIONS:
        pytest.skip("this SGLang has no sessions")
    return request.param


@pytest.fixture
def client(case, session):
    """A `RefitClient` of that server, which opens sessions or knows none."""
    from support.server.served import Client, ClientWithoutSessions

    return (Client if session else ClientWithoutSessions)(case.server.url)
