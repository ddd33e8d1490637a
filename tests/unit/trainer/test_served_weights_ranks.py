"""FSDP2 on two ranks computes as one process does, and proves it."""

from __future__ import annotations

from support.trainer.ranks import said_by_ranks


def test_two_ranks_of_fsdp2_train_and_prove_as_one_process():
    """FP32 shards, gathered in BF16; swapped before and after, with checkpointing and without."""
    assert said_by_ranks("served_ranks.py", size=2) == "as one process"
