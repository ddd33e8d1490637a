"""Every hook this plugin puts into SGLang, each with its reason and when it can go.

They are registered with SGLang's own `HookRegistry` (`declared_hooks.py`) and do nothing for models
that are served with another quantization method.
"""

from __future__ import annotations

from ...compat import SESSIONS_SINCE
from ...declared_hooks import Hook
from ..arrival.update_scope import Origin
from .attach import attach_to_model
from .kv_cache import after_flush, read_unfolded, start_kv_scales
from .model_choice import choose_as_for_fp8, leave_draft_model
from .routes import add_routes
from .session_calls import begin_session, end_session
from .status import add_status
from .update_calls import flattened_bucket, note_released_weights, update_hook

_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


HOOKS = (
    Hook(
        "sglang.srt.model_loader.utils.get_model_architecture",
        "AROUND",
        choose_as_for_fp8,
        "Mixtral with fused experts is for quantization methods of a list; this one is served like `fp8`",
        "SGLang asks the method, or has one Mixtral",
    ),
    Hook(
        "sglang.srt.model_loader.loader._initialize_model",
        "BEFORE",
        leave_draft_model,
        "a draft model inherits its target's quantization; it stays in high precision",
        "SGLang leaves drafts alone by default",
    ),
    Hook(
        "sglang.srt.model_loader.loader._initialize_model",
        "AFTER",
        attach_to_model,
        "the one place every loader builds a model in: loaders are wrapped before they run",
        "SGLang gives quantization methods the model they were built into",
    ),
    Hook(
        f"{_MANAGER}.update_weights_from_tensor",
        "AROUND",
        update_hook(Origin.TENSOR),
        "clients without sessions; a payload that can't be read must not end the scheduler; one "
        "rank's failure must reach the client",
        "SGLang answers failed updates and gathers outcomes over ranks",
    ),
    Hook(
        f"{_MANAGER}.update_weights_from_distributed",
        "AROUND",
        update_hook(Origin.DISTRIBUTED),
        "as above",
        "as above",
    ),
    Hook(
        f"{_MANAGER}.update_weights_from_disk",
        "AROUND",
        update_hook(Origin.DISK),
        "a failed update from disk is rolled back by loading again, and that may raise too",
        "SGLang answers failed updates",
    ),
    Hook(
        f"{_MANAGER}.update_weights_from_ipc",
        "AROUND",
        update_hook(Origin.IPC),
        "as for tensors",
        "as for tensors",
    ),
    Hook(
        f"{_MANAGER}.begin_weight_update",
        "AROUND",
        begin_session,
        "a session is a refit, and what the client says of it has to be known; a session for a draft "
        "model that is not there would update nothing",
        "SGLang lets plugins see a session begin",
        since=SESSIONS_SINCE,
    ),
    Hook(
        f"{_MANAGER}.end_weight_update",
        "AROUND",
        end_session,
        "the refit ends: what did not come, and half of an FP8 pair, have to be told",
        "SGLang lets plugins answer the end of a session",
        since=SESSIONS_SINCE,
    ),
    Hook(
        "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
        "._update_weights_from_flattened_bucket",
        "AROUND",
        flattened_bucket,
        "a bucket that is replayed needs none of its tensors as objects",
        "SGLang hands load_weights the bucket itself",
    ),
    Hook(
        f"{_MANAGER}.release_memory_occupation",
        "AFTER",
        note_released_weights,
        "memory that was released and resumed holds anything until a full update; the status says so",
        "SGLang tells the model that its weights are gone",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner.configure_kv_cache_dtype",
        "AFTER",
        start_kv_scales,
        "between the load and the first forward pass: the cache's dtype is known, its scales are folded",
        "SGLang tells quantization methods the dtype of the KV cache",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.flush_cache",
        "AFTER",
        after_flush,
        "scales of the KV cache may move at the moment in which it is empty, and at no other",
        "SGLang tells the model that the cache is empty",
    ),
    *(
        Hook(
            f"{_MANAGER}.{name}",
            "AROUND",
            read_unfolded,
            "who reads served weights gets them as they were sent, without the KV cache's scales",
            "SGLang scales every KV cache by tensors that an update can change",
        )
        for name in (
            "get_weights_by_name",
            "check_weights",
            "save_remote_model",
            "save_sharded_model",
        )
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        "AFTER",
        add_status,
        "the status section of /server_info; the plan, to a request that asks for it",
        "SGLang lets plugins add to internal_states",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__",
        "AFTER",
        add_routes,
        "made in every process that serves HTTP, when SGLang's app is there and not yet serving: "
        "it gets the routes GET /fp8rl/plan, /fp8rl/status and /fp8rl/fingerprint",
        "SGLang lets plugins add routes",
    ),
)
