"""A port for a server that binds it only seconds later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_IANA_EPHEMERAL = (49152, 65535)
# Ports that SGLang derives from a server's own: with DP attention its rendezvous is 233 above, its
# queues follow. The last is above all of them for eight replicas.
_DERIVED = (0, *range(233, 250))
_ALL = range(10_000, 65_536 - _DERIVED[-1])
# Where SGLang 0.5.23 looks for the port of its rendezvous.
_SGLANGS_OWN = range(22_000, 30_000)
_DRAWS = random.SystemRandom()  # a seed of the tests would give all of them the same ports
_TRIES = 200


def free_port() -> int:
    """A port that nothing is bound to, nor to what SGLang derives from it.

    It is outside the range from which the kernel serves `bind(0)` and `connect`: one of those is
    likely to be taken by a socket of SGLang's own before the server gets to bind it.
    """
    low, high = ephemeral_range()
    avoided = {*range(low, high + 1), *_SGLANGS_OWN}
    candidates = [port for port in _ALL if avoided.isdisjoint((port, port + _DERIVED[-1]))]
    # A host whose ephemeral range is nearly everything has no better ones.
    candidates = candidates or list(_ALL)
    for port in _DRAWS.sample(candidates, min(_TRIES, len(candidates))):
        if all(_is_free(port + more) for more in _DERIVED):
            return port
    raise OSError(f"no free port in {_TRIES} tries between {candidates[0]} and {candidates[-1]}")


def ephemeral_range() -> tuple[int, int]:
    """The kernel's, first and last; IANA's where it does not say."""
    try:
        low, high = EPHEMERAL_RANGE.read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return _IANA_EPHEMERAL


def _is_free(port: int) -> bool:
    """On all addresses, as SGLang's rendezvous listens; without taking over one in TIME_WAIT."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
