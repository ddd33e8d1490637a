"""Which models are held to the contract in which layouts. A new model is one line of `CONTRACT`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

from packaging.version import Version

HOST, OLDEST = Version(version("sglang")), Version("0.5.16")


@dataclass(frozen=True)
class Layout:
    """How an engine is spread over ranks; `no_forward` as in `Entry`."""

    name: str
    tp_size: int
    args: tuple[str, ...] = ()
    no_forward: str = ""


PINNED = "SGLang's DP attention puts every batch's sizes into pinned memory, which takes a GPU"

LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("tp1", 1),
        Layout("tp2", 2),
        # Two ranks with half of the experts each.
        Layout("ep2", 2, ("--ep-size", "2")),
        # Attention of one request on one rank each, experts of both on both.
        Layout("dp2", 2, ("--dp-size", "2", "--enable-dp-attention"), no_forward=PINNED),
    )
}
DENSE, MOE, MOE_AND_DP = ("tp1", "tp2"), ("tp1", "tp2", "ep2"), ("tp1", "tp2", "ep2", "dp2")


@dataclass(frozen=True)
class Entry:
    """One model of the contract.

    Attributes:
        model: a key of `models.MODELS`.
        layouts: keys of `LAYOUTS`.
        no_forward: why the CPU platform can't run its forward pass; empty if it can.
        no_native: why SGLang's own `fp8` method can't serve it quantized offline.
        since: the first SGLang it is served on, and `before` why not earlier.
    """

    model: str
    layouts: tuple[str, ...]
    no_forward: str = ""
    no_native: str = ""
    since: str = "0.5.16"
    before: str = ""

    def refused_here(self) -> str:
        """Why this host does not serve it; empty if it is served."""
        return self.before if Version(self.since) > HOST else ""


NO_FP8_BMM = "SGLang multiplies w_kc, FP8 here for want of blocks, with a GPU kernel"
BLOCKS_ONLY = "this SGLang derives w_kc and w_vc from blocks only; per channel it is refused"
NO_GATE_KERNEL = "SGLang fuses the shared expert's gate in a Triton kernel"
DROPS_SCALES = (
    "SGLang's Llama class drops `weight_scale_inv` of block-FP8 checkpoints, with a warning"
)

CONTRACT = (
    Entry("llama", DENSE, no_native=DROPS_SCALES),
    Entry("qwen2-bias", DENSE),
    Entry("qwen3", DENSE),
    Entry("qwen3-tied", ("tp1",)),
    Entry("qwen3-one-kv-head", ("tp2",)),
    Entry("llama-misaligned", DENSE, no_native=DROPS_SCALES),
    Entry("mistral", DENSE, no_native=DROPS_SCALES),
    Entry("gemma3", DENSE),
    Entry("phi3", DENSE, no_native=DROPS_SCALES),
    Entry("apertus", DENSE, no_native=DROPS_SCALES),
    Entry("qwen2.5-vl", DENSE),
    Entry("qwen3-vl", DENSE),
    Entry("qwen3-moe", MOE_AND_DP),
    Entry("qwen3-moe-misaligned", ("tp2", "ep2")),
    Entry("mixtral", MOE),
    Entry("qwen2-moe", MOE, no_forward=NO_GATE_KERNEL),
    Entry("glm4-moe", MOE),
    Entry("deepseek-v3", MOE_AND_DP),
    Entry("deepseek-lite", ("tp1",)),
    Entry(
        "deepseek-misaligned", ("tp2",), no_forward=NO_FP8_BMM, since="0.5.23", before=BLOCKS_ONLY
    ),
)


ENTRIES = {entry.model: entry for entry in CONTRACT}
CASES = [(entry, LAYOUTS[layout]) for entry in CONTRACT for layout in entry.layouts]

# What `make test` runs; `make test-all` runs all of them. Blocks and row scales, sharded and not,
# experts on ranks of their own and split, derived weights, a vision tower.
DEFAULT = {
    "qwen3-tp1",
    "qwen3-tp2",
    "llama-misaligned-tp2",
    "qwen3-moe-ep2",
    "qwen3-moe-misaligned-tp2",
    "deepseek-v3-tp1",
    "qwen2.5-vl-tp1",
}


def no_forward_of(model: str, layout: Layout) -> str:
    """Why a model generates nothing on the CPU platform; empty if it does."""
    entry = ENTRIES.get(model)
    return (entry.no_forward if entry else "") or layout.no_forward


def case_id(case: tuple[Entry, Layout]) -> str:
    return f"{case[0].model}-{case[1].name}"
