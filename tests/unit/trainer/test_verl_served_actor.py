"""veRL's own FSDP engine builds an actor that trains what is served, and nothing else does."""

from __future__ import annotations

import pytest
from support.trainer.ranks import said_by_ranks
from verl_trainer.names import CPU_PLATFORM

pytest.importorskip("verl")


def test_verl_s_actor_computes_as_served_and_its_reference_does_not(tmp_path):
    said = said_by_ranks("verl_actor.py", str(tmp_path), size=1, **CPU_PLATFORM)
    assert said == "the actor alone"
