"""One run of veRL's trainer: its command line, its environment, and what it left behind."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from sglang_fp8rl.lab.plan_offline import make_plan
from sglang_fp8rl.lab.testing.server import cpu_env
from verl_trainer.names import CPU_PLATFORM, RECORD, WRONG_SCALE
from verl_trainer.task import MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS

HERE = Path(__file__).parent
SERVED_ACTOR, PLAN_FILE = "sglang_fp8rl.verl_rollout.served_actor", "SGLANG_FP8RL_SERVED_PLAN"
MODULES = "verl_trainer.cpu_platform,sglang_fp8rl.verl_plugin,verl_trainer.recorder"


@dataclass(frozen=True)
class Arm:
    """What is different between the runs.

    Attributes:
        quantization: SGLang's `--quantization`; None serves BF16.
        wrong_scale: factor on one weight's scales in every refit; 1 is right.
        served: the actor computes with the weights as served.
    """

    name: str
    quantization: str | None = "fp8_blockwise_online"
    wrong_scale: float = 1.0
    served: bool = False


@dataclass(frozen=True)
class RunResult:
    """What one run left.

    Attributes:
        returncode: of the trainer.
        seconds: wall time, start of Ray included.
        refits: one entry per refit, as `recorder.py` wrote it.
        metrics: one dictionary per step, as veRL's own file logger wrote it.
        log: path of stdout and stderr.
        is_timeout: it was ended because it took too long.
    """

    arm: Arm
    returncode: int
    is_timeout: bool
    seconds: float
    refits: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    log: Path = field(repr=False)


def overrides(
    model: Path, problems: Path, arm: Arm, *, steps: int, tp_size: int, out: Path
) -> list[str]:
    """Hydra overrides of `verl.trainer.main_ppo`: GRPO with token-level TIS, sized for two cores."""
    rollout = "actor_rollout_ref.rollout"
    actor = "actor_rollout_ref.actor"
    sglang = f"+{rollout}.engine_kwargs.sglang"
    lines = [
        f"data.train_files={problems}",
        f"data.val_files={problems}",
        "data.train_batch_size=8",
        f"data.max_prompt_length={MAX_PROMPT_TOKENS}",
        f"data.max_response_length={MAX_RESPONSE_TOKENS}",
        "data.dataloader_num_workers=0",
        "data.shuffle=false",
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_is_threshold=2.0",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.use_remove_padding=false",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{actor}.strategy=fsdp2",
        f"{actor}.fsdp_config.strategy=fsdp2",
        f"{actor}.use_torch_compile=false",
        f"{actor}.fsdp_config.use_torch_compile=false",
        f"{actor}.optim.lr=3e-4",
        f"{actor}.ppo_mini_batch_size=8",
        f"{actor}.ppo_micro_batch_size_per_gpu=16",
        f"{actor}.use_kl_loss=false",
        f"{rollout}.name=sglang",
        f"{rollout}.n=8",
        f"{rollout}.tensor_model_parallel_size={tp_size}",
        f"{rollout}.gpu_memory_utilization=0.3",
        f"{rollout}.max_model_len={MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS}",
        f"{rollout}.max_num_seqs=32",
        f"{rollout}.enforce_eager=true",
        f"{rollout}.free_cache_engine=false",  # SGLang asks for CUDA when it gives memory back
        f"{rollout}.agent.num_workers=1",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=16",
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes=1",
        f"{rollout}.calculate_log_probs=true",
        f"{sglang}.device=cpu",
        f"{sglang}.attention_backend=torch_native",
        f"{sglang}.enable_memory_saver=false",
        f"{sglang}.sleep_on_idle=true",
        f"{sglang}.max_total_tokens=8192",
        f"{sglang}.disable_cuda_graph=true",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={HERE / 'task.py'}",
        "reward.custom_reward_function.name=compute_score",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=1000",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[console,file]",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={tp_size}",
        "trainer.device=cpu",
        f"trainer.default_local_dir={out / 'checkpoints'}",
        "trainer.ray_wait_register_center_timeout=600",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "ray_kwargs.ray_init.num_cpus=12",
        f"+ray_kwargs.ray_init.num_gpus={tp_size}",
        "+ray_kwargs.ray_init.include_dashboard=false",
        f"+ray_kwargs.ray_init.object_store_memory={256 << 20}",
        f"hydra.run.dir={out}",
    ]
    if arm.quantization:
        lines.append(f"{sglang}.quantization={arm.quantization}")
    if arm.served:
        lines.append(f"actor_rollout_ref.model.external_lib={SERVED_ACTOR}")
    return lines


def environment(arm: Arm, out: Path, tp_size: int) -> dict[str, str]:
    """A CPU for veRL, SGLang and Ray; what the run writes, and where."""
    env = {
        **os.environ,
        **cpu_env(tp_size),
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        **CPU_PLATFORM,
        "VERL_USE_EXTERNAL_MODULES": MODULES,
        "VERL_FILE_LOGGER_PATH": str(out / "metrics.jsonl"),
        RECORD: str(out / "refits.jsonl"),
        "OMP_NUM_THREADS": "1",
        "RAY_worker_register_timeout_seconds": "600",
        "RAY_gcs_server_request_timeout_seconds": "600",
        "RAY_DEDUP_LOGS": "0",
        "HYDRA_FULL_ERROR": "1",
        "PYTHONUNBUFFERED": "1",
    }
    # Ray compares it with the logical GPUs it is told of, and sets it itself in its workers.
    env.pop("CUDA_VISIBLE_DEVICES", None)
    if arm.wrong_scale != 1:
        env[WRONG_SCALE] = str(arm.wrong_scale)
    if arm.served:
        env[PLAN_FILE] = str(out / "plan.json")
    return env


def run_trainer(
    model: Path, problems: Path, arm: Arm, *, steps: int, tp_size: int, out: Path, timeout: float
) -> RunResult:
    """Run it to its end, in a process group of its own that is gone afterwards."""
    out.mkdir(parents=True, exist_ok=True)
    for stale in ("metrics.jsonl", "refits.jsonl"):
        (out / stale).unlink(missing_ok=True)
    if arm.served:
        plan = make_plan(str(model), tp_size=tp_size)
        (out / "plan.json").write_text(json.dumps(plan.document))
    log = out / "trainer.log"
    command = [sys.executable, "-m", "verl.trainer.main_ppo"]
    command += overrides(model, problems, arm, steps=steps, tp_size=tp_size, out=out)
    began, is_timeout = time.monotonic(), False
    # Ray's sockets lie below it, and a socket's path may have 107 bytes: not below `out`.
    with (
        log.open("wb") as file,
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
    ):
        command.append(f"+ray_kwargs.ray_init._temp_dir={folder}")
        process = subprocess.Popen(
            command,
            env=environment(arm, out, tp_size),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            is_timeout = True
        finally:
            _end_session(process.pid)
            returncode = process.wait()
    seconds = time.monotonic() - began
    metrics = [line["data"] for line in _lines(out / "metrics.jsonl")]
    refits = _lines(out / "refits.jsonl")
    return RunResult(arm, returncode, is_timeout, seconds, refits, metrics, log)


def _end_session(leader: int) -> None:
    """Kill what is left of the session that `leader` began: trainer, Ray, workers, schedulers."""
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):  # gone already
            if os.getsid(process.pid) == leader:
                process.kill()


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
