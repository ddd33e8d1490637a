"""Every change to SGLang, torch or veRL that is no declared hook: what, why, and when it can go.

Together with the hooks (`engine/host/hooks.py`, `lab/cpu_platform/cpu_hooks.py`, `verl_rollout/hooks.py`) this
is all that is done to a host. A test finds the changes in the sources and compares; `docs/architecture.md` has
the table. Data only.
"""

from __future__ import annotations

from dataclasses import dataclass

_NEVER = "stays: it is the interface"


@dataclass(frozen=True)
class Change:
    """One change, wherever it is made.

    Attributes:
        what: as the sources write it: assigned to, deleted or called.
        reason, until: as of a `Hook`.
    """

    what: tuple[str, ...]
    reason: str
    until: str


CHANGES = (
    Change(
        ("self.model.load_weights",),
        "every way of an update ends there: it opens a call, and counts, casts and checks what comes in it",
        "SGLang hands what is loaded to the quantization method",
    ),
    Change(
        ("parameter.weight_loader", "parameter._weight_loader"),
        "the loader runs on a stand-in, and its final copies are cast",
        "loaders copy through a method of the parameter",
    ),
    Change(
        ("setattr(deriver.module, …)",),
        "`post_load_weights` and its like: which of them a model uses is seen, so that they run again after a "
        "replay, and not before a load",
        "SGLang says which weights it derives from which",
    ),
    Change(
        ("old.owner", "new.owner", "old.tensor.data"),
        "derived weights are written into the memory they had: CUDA graphs hold its address",
        "SGLang derives in place",
    ),
    Change(
        ("manager.flush_cache",),
        "for one request: whether it was the flush that SGLang refused, or the update",
        "SGLang's answer tells them apart",
    ),
    Change(
        ("manager._session",),
        "a session whose begin or end failed is over; SGLang would refuse every other update",
        "SGLang ends a session that failed",
    ),
    Change(
        ("result.success", "result.message"),
        "SGLang's answer says what any rank found",
        "SGLang gathers the outcomes of all ranks",
    ),
    Change(
        ("result.internal_state",),
        "the status, and the plan where it is asked for",
        "SGLang lets plugins add to internal_states",
    ),
    Change(
        (
            "reductions.rebuild_storage_filename",
            "reductions.rebuild_storage_fd",
            "reductions.shared_cache",
        ),
        "for one request: torch extends a file that is too short, and its manager deletes files that trainers "
        "hold",
        "torch checks the length and needs no manager",
    ),
    Change(
        ("gc.disable", "gc.enable"),
        "for one request: of 18,000 names, the collector takes ten times as long as unpickling them",
        "no client sends an object for each tensor",
    ),
    Change(
        ("torch.set_default_dtype",),
        "a reload from disk that fails leaves the model's dtype as torch's default",
        "0.5.16 is dropped",
    ),
    Change(
        ("model_config.quantization",),
        "while SGLang chooses the model's class: Mixtral is chosen by a list of methods",
        "SGLang asks the method, or has one Mixtral",
    ),
    Change(
        (
            "QUANTIZATION_METHODS",
            "add_quantization_method_choices",
            "linear.WEIGHT_LOADER_V2_SUPPORTED.append",
            "HookRegistry.register",
        ),
        "the method, its choice on the command line, its kind of loader, its hooks",
        _NEVER + " of a plugin",
    ),
    Change(
        (
            "layer.logical_widths",
            "layer.input_size_per_partition",
            "layer.output_size_per_partition",
            "layer.orig_dtype",
            "layer.register_parameter",
            "layer.dispatcher.set_quant_config",
            "set_weight_attrs",
            "packed.format_ue8m0",
            "setattr(layer, …)",
        ),
        "`create_weights` and `process_weights_after_loading`: what SGLang's own methods set on their layer",
        _NEVER + " of a quantization method",
    ),
    Change(
        ("layer.quant_method",),
        "a vision tower is known when the model is built, and stays unquantized",
        "SGLang gives no vision tower the language model's quantization",
    ),
    Change(
        ("fused.mode",),
        "Blackwell: a fused gate and up projection takes any FP8 layer without blocks for its own, and quantizes "
        "activations",
        "SGLang asks the quantization method whether its layers may be fused",
    ),
    Change(
        ("layer.fp8rl_prefix", "fused.fp8rl_part_rows", "setattr(model, …)"),
        "notes of ours on SGLang's objects: the prefix that options name, rows of fused parts, the refit",
        "SGLang tells a layer its prefix, and plugins their model",
    ),
    Change(
        ("registry.register", "adapters"),
        "the rollout `sglang` of veRL: our replica and adapter",
        _NEVER + " of a rollout",
    ),
    Change(
        ("setattr(module, …)", "replacement.fp8rl_hook"),
        "WRAP hooks of veRL, see its table",
        "as there",
    ),
    Change(
        ("torch.multiprocessing.set_sharing_strategy",),
        "CPU tensors between processes that did not start each other: while a bucket is made, and for good on "
        "the CPU platform",
        "torch authenticates such peers",
    ),
    Change(
        ("torch.distributed.new_group",),
        "`plan` only, in a process of its own: rank 0 builds the model without the others",
        "SGLang builds a model without a process group",
    ),
    Change(
        (
            "server_args.attention_backend",
            "server_args.sampling_backend",
            "server_args.disable_overlap_schedule",
            "server_args.disable_custom_all_reduce",
            "server_args.max_total_tokens",
            "server_args.max_running_requests",
            "AttentionBackendRegistry.register",
            "register_attention_backend",
        ),
        "CPU platform only: what runs on a CPU, with MLA absorbed as on a GPU",
        _NEVER + " of a platform",
    ),
    Change(
        ("host.get_device_module",),
        "CPU platform only, while memory is released: a CUDA build of torch names CUDA there",
        "SGLang synchronizes the device that it serves on",
    ),
    Change(
        ("layer.forward",),
        "`sensitivity` only, in its own model: layers before the one that is looked at give what they gave",
        "stays: it is the measurement",
    ),
    Change(
        ("multiprocessing.set_start_method",),
        "servers of tests and the demo on the CPU platform: a fork has everything imported",
        "SGLang lets a plugin choose",
    ),
    Change(
        (
            "module.__class__",
            "one.module.__class__",
            "setattr(one.module, …)",
            "delattr(module, …)",
            "delattr(model, …)",
        ),
        "a trainer's model that is asked to compute as served: its modules change their class, and keep their parameters",
        "stays: `compute_as_stored` takes it back",
    ),
    Change(
        ("ctx.loan",),
        "autograd's own place for what a backward pass needs",
        _NEVER,
    ),
    Change(
        (
            "FSDPEngine._build_model_optimizer",
            "build_and_swap.fp8rl_served",
        ),
        "an actor of veRL whose `external_lib` asks for it computes as served",
        "veRL calls a function of the user's on a model that it has built",
    ),
)
