"""What the run and the processes of its trainer call each other's things."""

PLATFORM = "fp8rl_cpu"
CPU_PLATFORM = {
    "VERL_PLATFORM": PLATFORM,
    "VERL_USE_EXTERNAL_MODULES": "verl_trainer.cpu_platform",
    "VERL_ENGINE_DEVICE": "cuda",
}
"""Environment of a process in which veRL takes a CPU for its device; `benchmarks` is on its path."""
RECORD, WRONG_SCALE = "FP8RL_RECORD", "FP8RL_WRONG_SCALE"
