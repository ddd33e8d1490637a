"""FP8 rollout for RL on SGLang. Importing this imports neither torch nor sglang."""

__version__ = "0.1.0"
