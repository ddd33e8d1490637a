"""Each named fact of `versions.py` against the SGLang that is installed."""

import inspect

import pytest

pytest.importorskip("sglang")

from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.model_loader.utils import should_deepgemm_weight_requant_ue8m0
from sglang.srt.platforms.interface import SRTPlatform
from sglang.srt.server_args import ServerArgs

from sglang_fp8rl import versions


def takes(function, name):
    return name in inspect.signature(function).parameters


SEEN = {
    "TELLS_WHAT_DRAFTS_ASKED_FOR": lambda: (
        "_speculative_draft_quantization_explicitly_set" in inspect.get_annotations(ServerArgs)
    ),
    "RECORDS_WEIGHT_VERSIONS": lambda: hasattr(Scheduler, "record_weight_version_change"),
    "HAS_POW2_ACTIVATIONS": lambda: takes(Fp8Config.__init__, "scale_fmt"),
    "HAS_SESSIONS": lambda: hasattr(SchedulerWeightUpdaterManager, "begin_weight_update"),
    "RANKS_ARE_GLOBAL": lambda: not takes(run_scheduler_process, "attn_cp_rank"),
    "PLATFORMS_NAME_POOLS": lambda: hasattr(SRTPlatform, "get_kv_pool_cls"),
    "PACKS_EXPERTS_APART": lambda: takes(should_deepgemm_weight_requant_ue8m0, "grouped_moe"),
}


def test_every_fact_is_looked_for_here():
    facts = {name for name, value in vars(versions).items() if isinstance(value, bool)}
    assert facts == SEEN.keys()


@pytest.mark.parametrize("name", SEEN)
def test_a_fact_is_what_the_installed_sglang_has(name):
    assert getattr(versions, name) is SEEN[name]()
