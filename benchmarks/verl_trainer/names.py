"""What the run and the processes of its trainer call each other's things."""

PLATFORM = "fp8rl_cpu"
RECORD, WRONG_SCALE = "FP8RL_RECORD", "FP8RL_WRONG_SCALE"
