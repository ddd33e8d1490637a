"""What a HiCache storage backend, or the cache of images, keeps was computed with the old weights: a refit clears it, or fails."""

from __future__ import annotations

import sys

import pytest
import torch
from support.engine.commands import status, update
from support.engine.kv_commands import flush
from support.engine.models import MODELS
from support.engine.pool import on

pytestmark = pytest.mark.engine

ITEMS = list(MODELS["qwen3"].first.items())


def store(scheduler, can_clear):
    """A backend under SGLang's own cache; attaching a real one wants pinned memory."""
    scheduler.enable_hicache_storage, scheduler.test_cleared = can_clear is not None, []
    tree = scheduler.tree_cache
    if not hasattr(scheduler, "test_tree_clears"):
        scheduler.test_tree_clears = (
            tree.clear_storage_backend if hasattr(tree, "clear_storage_backend") else None
        )

    def clear_storage_backend():
        scheduler.test_cleared.append(1)
        return can_clear

    tree.clear_storage_backend = clear_storage_backend


def cleared(scheduler):
    return len(scheduler.test_cleared)


@on("qwen3-tp1")
def test_a_refit_clears_what_is_stored_once_it_ends(host):
    host.in_doubt = True
    host.call(store, True)
    assert host.call(update, ITEMS[:5], None, False)[0]
    assert host.call(cleared) == 0
    assert host.call(update, ITEMS[5:], None, True)[0]
    assert host.call(cleared) == 1
    assert host.call(status)["state"] == "whole"


@on("qwen3-tp1")
def test_a_refit_whose_stored_cache_can_t_be_cleared_fails_by_name(host):
    host.in_doubt = True
    host.call(store, False)
    host.refuses(ITEMS, "storage backend")
    host.call(store, None)
    assert host.call(update, ITEMS)[0]
    assert host.call(status)["state"] == "whole"


@on("qwen3-tp1")
def test_a_refit_that_a_flush_of_the_cache_ends_clears_what_is_stored(host):
    host.in_doubt = True
    host.call(store, True)
    host.refuses([(ITEMS[0][0], torch.full_like(ITEMS[0][1], float("nan")))])
    before = host.call(cleared)
    for items in (ITEMS[:5], ITEMS[5:]):  # out of step: nothing says that this is one update
        assert host.call(update, items, None, False)[0]
    assert host.call(status)["state"] == "failed"
    assert host.call(cleared) == before
    assert host.call(flush)
    assert host.call(cleared) == before + 1
    assert host.call(status)["state"] == "whole"


@on("qwen3-tp1")
def test_whoever_has_the_cache_flushed_behind_new_weights_has_the_stored_one_cleared(host):
    host.in_doubt = True
    host.call(store, True)
    assert host.call(update, ITEMS[:5])[0]  # mixed: it may go on
    assert host.call(cleared) == 1
    host.refuses([ITEMS[5], (ITEMS[6][0], torch.ones(3, 3))])
    assert host.call(cleared) == 2  # a part of it was stored
    host.call(store, None)
    assert host.call(update, ITEMS)[0]


def embedded(scheduler, is_cached):
    """What an image is embedded as: by SGLang's function for prompts, or by the model alone."""
    from sglang.srt.managers.mm_utils import init_mm_embedding_cache
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

    model = scheduler.tp_worker.model_runner.model
    vision = model.config.vision_config
    pixels = 3 * vision.temporal_patch_size * vision.patch_size**2
    feature = torch.randn(64, pixels, generator=torch.Generator().manual_seed(5))
    item = MultimodalDataItem(modality=Modality.IMAGE, feature=feature, offsets=[(2, 17)])
    item.image_grid_thw = torch.tensor([[1, 8, 8]])
    item.hash, item.pad_value = 12345, 7
    with torch.no_grad():
        if not is_cached:
            return model.get_image_feature([item]).float()
        embed = sys.modules[init_mm_embedding_cache.__module__].get_embedding_and_mask
        tokens = torch.tensor([0] * 2 + [7] * 16 + [0] * 2)
        where = [0, 1], [0], [20], [[(2, 17)]]
        return embed(model.get_image_feature, [item], tokens[2:3], tokens, *where)[0].float()


@on("qwen2.5-vl-tp1")
def test_an_image_is_embedded_by_the_weights_of_the_last_update(host):
    host.in_doubt = True
    for state in (host.model.first, host.model.second):
        host.call(embedded, True)
        assert host.call(update, list(state.items()), None, False)[0]
        assert torch.equal(host.call(embedded, True), host.call(embedded, False))
