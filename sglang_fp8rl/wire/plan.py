"""The plan as a trainer sees it: for every name it may send, how the server stores it.

The document is made by the engine (`engine/plan/extension.py`) from the modules that were built, and
is the same from `GET /fp8rl/plan`, `fetch_plan(url)` and `sglang-fp8rl plan MODEL --json`. Its schema
is `plan_schema.json`. Nothing here needs torch or SGLang.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import RefitError, remedy_for_unknown
from ..scheme import Cause

PLAN_FORMAT = "sglang-fp8rl/plan"
PLAN_VERSION = 1
PLAN_PATH = "/fp8rl/plan"
STATUS_PATH = "/fp8rl/status"
FP8 = "float8_e4m3fn"
UNUSED = "unused"  # the scheme of a name that the checkpoint has and no parameter takes


@dataclass(frozen=True)
class TensorPlan:
    """How one tensor of the trainer is stored, and how it may be sent.

    Attributes:
        name: as trainers and checkpoints write it (`k_proj`, not `qkv_proj`).
        shape: full and unsharded; None if no parameter takes it.
        module: the module of the served model that holds it (`qkv_proj`), as `ignored_layers` names it.
        scheme: `blockwise`, `per_channel`, `high_precision` or `unused`.
        dtype: on the wire, if quantized by the trainer: `float8_e4m3fn`, or the dtype of high
            precision that loses nothing.
        scale_name: name of the FP32 scale that goes with FP8; empty otherwise.
        scale_shape: its shape.
        block_size: what shares one scale on the server; None if it is not FP8 there. Per channel it is
            `[1, columns of a rank's shard]`.
        reason: why it is not FP8, or not FP8 on the wire.
    """

    name: str
    shape: tuple[int, ...] | None
    module: str
    scheme: str
    dtype: str
    scale_name: str = ""
    scale_shape: tuple[int, ...] = ()
    reason: str = ""
    block_size: tuple[int, int] | None = None

    @property
    def is_fp8_on_wire(self) -> bool:
        return self.dtype == FP8


@dataclass(frozen=True)
class ModulePlan:
    """How one linear module of the served model is stored.

    Attributes:
        scheme: `blockwise`, `per_channel` or `high_precision`.
        cause: what decided.
        reason: the same in words, with the value and the rule; empty for blockwise.
        activations: `fp8`, or `bf16` where the module multiplies with them as they are.
    """

    module: str
    scheme: str
    cause: Cause
    reason: str
    activations: str


@dataclass(frozen=True)
class RefitPlan:
    """One model's plan, checked against its digest.

    Attributes:
        document: the whole document, as JSON types.
        tensors: name to `TensorPlan`.
        digest: `sha256:` and the hash of the canonical JSON without the digest.
    """

    document: Mapping[str, Any]
    tensors: Mapping[str, TensorPlan]
    digest: str

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> RefitPlan:
        """Read a document from wherever it was kept. Raises `RefitError` if it is no plan that this version
        reads, or was changed."""
        is_document = isinstance(document, Mapping)
        found = is_document and (document.get("format"), document.get("version"))
        if found != (PLAN_FORMAT, PLAN_VERSION):
            raise RefitError(
                "plan",
                f"a document of format and version {found}",
                f"this sglang-fp8rl reads {PLAN_FORMAT!r}, version {PLAN_VERSION}",
                "Get it from fetch_plan(url) or `sglang-fp8rl plan MODEL --json`, with the same "
                "sglang-fp8rl on the trainer and the server.",
            )
        expected = digest_of(document)
        if document.get("digest") != expected:
            raise RefitError(
                "plan",
                f"digest {document.get('digest')}",
                f"its content has the digest {expected}: it was changed after it was made",
                "Fetch it again.",
            )
        tensors = {
            name: TensorPlan(
                name=name,
                shape=tuple(row["shape"]) if row["shape"] is not None else None,
                module=row["module"],
                scheme=row["scheme"],
                dtype=row["wire"]["dtype"],
                scale_name=row["wire"].get("scale", ""),
                scale_shape=tuple(row["wire"].get("scale_shape", ())),
                reason=row["reason"],
                block_size=tuple(row["block_size"]) if row["block_size"] else None,
            )
            for name, row in document["tensors"].items()
        }
        return cls(document, tensors, expected)

    @property
    def block_size(self) -> tuple[int, int]:
        block_n, block_k = self.document["options"]["weight_block_size"]
        return block_n, block_k

    @property
    def rounding(self) -> dict[str, Any]:
        """The options of the cast, as `numerics` takes them."""
        options = self.document["options"]
        return {
            "pow2_scale": options["use_weight_pow2_scale"],
            "round_to_bf16": options["round_to_bf16"],
        }

    def as_dict(self) -> dict[str, Any]:
        """The document, to be kept as JSON and read with `from_dict`."""
        return dict(self.document)

    def why_not_needed(self, name: str) -> str:
        """Why the engine does without that name (tied, computed); empty if it takes it."""
        return self._left_out(name).get("reason", "")

    def tied_to(self, name: str) -> str:
        """The name under which the engine takes that tensor; empty if there is no other."""
        return self._left_out(name).get("equals", "")

    def _left_out(self, name: str) -> Mapping[str, str]:
        if name in self.tensors:
            return {}
        rows = self.document["left_out"]
        return next((row for row in rows if re.search(row["pattern"], name)), {})

    @functools.cached_property
    def modules(self) -> Mapping[str, ModulePlan]:
        """By their names in the served model (`qkv_proj`, not `k_proj`)."""
        return {
            row["module"]: ModulePlan(**{**row, "cause": Cause(row["cause"])})
            for row in self.document["modules"]
        }

    def of(self, name: str) -> TensorPlan:
        """The plan of one tensor. Raises `RefitError`, with near matches, for a name that it does not know."""
        found = self.tensors.get(name)
        if found is None:
            model = self.document["model"]["architecture"]
            raise RefitError(
                name,
                f"not in the plan of {model} ({len(self.tensors)} names, {self.digest[:15]}…)",
                "a tensor is quantized as the server's plan says, or not at all",
                remedy_for_unknown(
                    name,
                    self.tensors,
                    "Send names as the checkpoint has them, and fetch the plan of this model.",
                ),
            )
        return found


def digest_of(document: Mapping[str, Any]) -> str:
    """`sha256:` and the hash of the canonical JSON (sorted keys, no spaces) without `digest`."""
    content = {key: value for key, value in document.items() if key != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
