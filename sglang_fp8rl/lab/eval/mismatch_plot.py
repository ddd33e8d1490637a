"""The gap as a picture: log-ratios, and the two probabilities of every token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ConfigError

if TYPE_CHECKING:
    import torch

    from ..metrics import MismatchMetrics

_FORMATS = (".png", ".pdf", ".svg")


def check_plot_path(path: Path) -> None:
    """Refuse, before any work is done, what could not be written at its end.

    Raises:
        ConfigError: no matplotlib, a format that isn't drawn, or no such folder.
    """
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(
            "--plot", str(path), f"the name ends in {', '.join(_FORMATS)}", "Rename the file."
        )
    if not path.absolute().parent.is_dir():
        raise ConfigError("--plot", str(path), "its folder exists", "Create the folder.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--plot",
            "no module `matplotlib`",
            "plots are drawn with matplotlib",
            'Install "sglang-fp8rl[lab]", or leave --plot out.',
        ) from error


def plot_mismatch(
    rollout_logprobs: torch.Tensor,
    trainer_logprobs: torch.Tensor,
    metrics: MismatchMetrics,
    path: Path,
) -> None:
    """Draw (tokens,) log-probabilities of both engines into `path`.

    Side Effects:
        Writes the file. No global matplotlib state is touched.
    """
    from matplotlib.figure import Figure

    ratio = (trainer_logprobs - rollout_logprobs).double().numpy()
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.hist(ratio, bins=80, color="#3b6fb6")
    left.set_yscale("log")
    left.axvline(0.0, color="black", linewidth=0.8)
    left.set_xlabel("log p(trainer) - log p(rollout)")
    left.set_ylabel("tokens")
    left.set_title(f"k3 KL {metrics.kl_k3:.2e}, largest ratio {metrics.ratio_max:.3g}")
    right.plot([0, 1], [0, 1], color="black", linewidth=0.8)
    right.scatter(
        rollout_logprobs.exp().numpy(),
        trainer_logprobs.exp().numpy(),
        s=6,
        alpha=0.35,
        color="#3b6fb6",
        edgecolors="none",
    )
    right.set_aspect("equal")
    right.set_xlabel("p(rollout)")
    right.set_ylabel("p(trainer)")
    right.set_title(f"{metrics.tokens} tokens, Pearson {metrics.prob_pearson:.4f}")
    figure.savefig(path, dpi=150)
