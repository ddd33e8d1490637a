"""Which models are held to the contract in which layouts. A new model is one line of `CONTRACT`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

from packaging.version import Version

HOST = Version(version("sglang"))


@dataclass(frozen=True)
class Layout:
    """How an engine is spread over ranks."""

    name: str
    tp_size: int
    args: tuple[str, ...] = ()


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("tp1", 1),
        Layout("tp2", 2),
        # Two ranks with half of the experts each.
        Layout("ep2", 2, ("--ep-size", "2")),
    )
}
DENSE, MOE = ("tp1", "tp2"), ("tp1", "tp2", "ep2")


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
        """Why this host does not serve it; empty if it does."""
        return self.before if Version(self.since) > HOST else ""


NO_MLA = "SGLang's torch_native attention has no MLA"
NO_GATE_KERNEL = "SGLang fuses the shared expert's gate in a Triton kernel"

CONTRACT = (
    Entry("llama", DENSE),
    Entry("qwen2-bias", DENSE),
    Entry("qwen3", DENSE),
    Entry("qwen3-tied", ("tp1",)),
    Entry("qwen3-one-kv-head", ("tp2",)),
    Entry("llama-misaligned", DENSE),
    Entry("mistral", DENSE),
    Entry("gemma3", DENSE),
    Entry("phi3", DENSE),
    Entry("qwen2.5-vl", DENSE),
    Entry("qwen3-vl", DENSE),
    Entry("qwen3-moe", MOE),
    Entry("qwen3-moe-misaligned", ("tp2", "ep2")),
    Entry("mixtral", MOE),
    Entry("qwen2-moe", MOE, no_forward=NO_GATE_KERNEL),
    Entry("glm4-moe", MOE),
    Entry("deepseek-v3", MOE, no_forward=NO_MLA),
    Entry("deepseek-lite", ("tp1",), no_forward=NO_MLA),
    Entry("deepseek-misaligned", ("tp2",), no_forward=NO_MLA),
)

CASES = [(entry, LAYOUTS[layout]) for entry in CONTRACT for layout in entry.layouts]


def case_id(case: tuple[Entry, Layout]) -> str:
    return f"{case[0].model}-{case[1].name}"
