"""What differs between the versions of SGLang that are served with, each as a named fact.

A fact is the release since which it holds; it goes, with what asks for it, when the oldest supported version has it.
`tests/unit/engine/test_version_facts.py` holds each of them against the SGLang that is installed.
"""

from __future__ import annotations

from packaging.version import Version

from .compat import NEWEST_EXCLUDED, host_version


def _holds_since(release: str) -> bool:
    return (host_version() or NEWEST_EXCLUDED) >= Version(release)


# `--speculative-draft-model-quantization` is told apart from what a draft inherits of its target.
TELLS_WHAT_DRAFTS_ASKED_FOR = _holds_since("0.5.18")
# A scheduler writes down when the version of its weights changed.
RECORDS_WEIGHT_VERSIONS = _holds_since("0.5.19")
# Kernels can be asked for power-of-two activation scales: `scale_fmt` of `Fp8Config`.
HAS_POW2_ACTIVATIONS = _holds_since("0.5.20")
# Updates outside of `begin_weight_update` … `end_weight_update` are refused; they name target or draft.
SESSIONS_SINCE = "0.5.21"
HAS_SESSIONS = _holds_since(SESSIONS_SINCE)
# Ranks are asked for in `runtime_context`; before, a scheduler is given them, and keeps them as `ps`.
RANKS_ARE_GLOBAL = _holds_since("0.5.21")
# A platform may name the pools of the KV cache.
PLATFORMS_NAME_POOLS = _holds_since("0.5.22")
# DeepGEMM's choice of packed scales depends on whether a matrix is an expert's: `grouped_moe`.
PACKS_EXPERTS_APART = _holds_since("0.5.23")


def derives_from_row_scales() -> bool:
    """Whether `w_kc` and `w_vc` are derived by the block size of their own layer (0.5.23).

    Looked for: in a nightly without it, row scales would be read as blocks, and nothing would say so.
    """
    from sglang.srt.models.deepseek_common import deepseek_weight_loader

    return hasattr(deepseek_weight_loader, "_resolve_layer_weight_block_size")
