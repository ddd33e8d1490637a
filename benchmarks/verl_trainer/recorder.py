"""Puts the adapter that writes things down where veRL looks for it.

Loaded by `VERL_USE_EXTERNAL_MODULES`, behind this package's plugin.
"""

from __future__ import annotations

from verl.workers.rollout import base

import sglang_fp8rl.verl_plugin as plugin  # registers; this goes on top of it

base._ROLLOUT_REGISTRY[plugin.ROLLOUT, "async"] = "verl_trainer.recording_adapter.RecordingAdapter"
