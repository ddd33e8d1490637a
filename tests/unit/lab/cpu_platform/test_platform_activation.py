"""The CPU platform is there when asked for, and only then."""

from __future__ import annotations

import pytest
from support.python import printed_by

from sglang_fp8rl.compat import CPU_PLATFORM
from sglang_fp8rl.lab.cpu_platform import activate


@pytest.mark.parametrize("value", [None, "", "cuda", "fp8rl", "FP8RL_CPU"])
def test_not_active_unless_asked_for_by_name(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    if value is not None:
        monkeypatch.setenv("SGLANG_PLATFORM", value)
    assert activate() is None


def test_active_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", CPU_PLATFORM)
    assert activate() == "sglang_fp8rl.lab.cpu_platform.cpu:Fp8RlCpuPlatform"


def test_asking_imports_neither_torch_nor_sglang() -> None:
    code = (
        "import sys; from sglang_fp8rl.lab.cpu_platform import activate; activate(); "
        "print([m for m in ('torch', 'sglang') if m in sys.modules])"
    )
    assert printed_by(code, SGLANG_PLATFORM=CPU_PLATFORM).strip() == "[]"
