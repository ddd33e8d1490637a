"""What SGLang or torch raises while an update is read becomes an error with a remedy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_fp8rl.engine.host.payload import not_read

patch_torch = pytest.importorskip("sglang.srt.utils.patch_torch")


@pytest.mark.parametrize("gpus", [(), ("uuid-a",), ("uuid-a", "uuid-c")])
def test_a_gpu_that_the_server_does_not_see_is_named(monkeypatch, gpus):
    properties = lambda at: SimpleNamespace(uuid=gpus[at])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    with pytest.raises(Exception, match="uuid-b") as raised:
        patch_torch._device_from_maybe_uuid("uuid-b")
    said = str(not_read("update_weights_from_tensor", raised.value))
    assert said.startswith("a handle of memory on GPU uuid-b: ")
    assert f"sees {', '.join(gpus) or 'no GPU'};" in said
    assert "CUDA_VISIBLE_DEVICES" in said


def test_anything_else_says_how_to_send():
    said = str(not_read("update_weights_from_tensor", EOFError("Ran out of input")))
    for words in ("EOFError: Ran out of input", "as SGLang's serializer writes it", "RefitClient"):
        assert words in said
