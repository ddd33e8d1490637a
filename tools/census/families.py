"""The table of families in `docs/models.md`: what RL users run first, and what the census found of each."""

from __future__ import annotations

from .layout import TWO_RANKS
from .outcome import Row
from .page import cut, escaped
from .results import described, newest

# A family, and its classes in SGLang's registry.
FAMILIES: dict[str, tuple[str, ...]] = {
    "Qwen3-Next": ("Qwen3NextForCausalLM", "Qwen3NextForCausalLMMTP"),
    "Qwen3.5 dense": ("Qwen3_5ForCausalLM", "Qwen3_5ForCausalLMMTP"),
    "Qwen3.5 MoE": ("Qwen3_5MoeForCausalLM",),
    "Qwen3.5 VL": ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
    "GLM-4.7-Flash": ("Glm4MoeLiteForCausalLM", "Glm4MoeLiteForCausalLMNextN"),
    "GLM-5": ("GlmMoeDsaForCausalLM", "GlmMoeDsaForCausalLMNextN"),
    "GLM-5.3-Flash": ("Glm5NextForConditionalGeneration",),
    "DeepSeek-V3.2": ("DeepseekV32ForCausalLM",),
    "DeepSeek-V4": ("DeepseekV4ForCausalLM", "DeepseekV4ForCausalLMNextN"),
    "Kimi-Linear": ("KimiLinearForCausalLM",),
    "Kimi-K2.5": ("KimiK25ForConditionalGeneration",),
    "Kimi-K3": ("KimiK3ForConditionalGeneration", "KimiK3LinearForCausalLM"),
    "MiMo-V2": ("MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM", "MiMoV2MTP"),
    "MiniMax-M2": ("MiniMaxM2ForCausalLM",),
    "MiniMax-M3": ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"),
    "Gemma 4": ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    "Llama 4": ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
}
_COLUMNS = (
    "family",
    "class",
    "load, two refits, = fresh",
    "replayed",
    "a tensor per call",
    "with and without `language_model.`",
    "a token",
    *(layout.title for layout in TWO_RANKS),
    "why not",
)
LONGEST = 160  # a reason; the results file has all of it


def section() -> str:
    """From the results of the newest host."""
    provenance, rows = newest()
    parted = [newest(layout)[1] for layout in TWO_RANKS]
    lines = [
        f"SGLang {provenance['sglang']}. {described(provenance)}",
        "",
        f"| {' | '.join(_COLUMNS)} |",
    ]
    lines.append("|---" * len(_COLUMNS) + "|")
    for family, classes in FAMILIES.items():
        for one in classes:
            *cells, why = _cells(rows.get(one))
            cells += [_at_two_ranks(found.get(one), rows.get(one)) for found in parted]
            lines.append(f"| {' | '.join((family, one, *cells, why))} |")
    return "\n".join([*lines, ""])


def _at_two_ranks(row: Row | None, one_rank: Row | None) -> str:
    """What was found, of the worse of them; a reason where one rank has no such."""
    if row is None or row.is_left_out:
        return "no experts" if row else "not tried"
    if row.silent:
        return f"**silent**: {_told(', '.join(row.silent))}"
    if row.kind == "draft":
        return "in high precision"
    if not row.is_judged:
        is_alike = one_rank is not None and one_rank.kind == row.kind
        return row.kind if is_alike else f"{row.kind}: {_told('; '.join(row.reasons))}"
    kind = "native" if row.kind == "not started" else row.kind
    told = [kind, "token" if row.is_proven else "bytes"]
    return ", ".join([*told, *([] if row.is_parted else ["not a tensor per call"])])


def _cells(row: Row | None) -> tuple[str, ...]:
    if row is None:
        return (*["not tried"] * 5, "this SGLang has no such class")
    if row.kind == "draft":
        return ("in high precision", "no", "", "", "", _told("; ".join(row.reasons)))
    if not row.is_judged:
        return (row.kind, "", "", "", "", _told("; ".join(row.reasons)))
    return (
        "no" if row.silent else "yes",
        "yes" if row.kind == "replayed" else "no",
        _parted(row),
        "yes" if row.other_names else "",
        _yes(row.is_proven),
        _told("; ".join(filter(None, [*row.reasons, row.whole_only, row.not_run]))),
    )


def _parted(row: Row) -> str:
    is_known = row.is_parted or row.whole_only or row.silent
    return _yes(row.is_parted) if is_known else "not run"


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _told(text: str) -> str:
    return escaped(cut(text, LONGEST))
