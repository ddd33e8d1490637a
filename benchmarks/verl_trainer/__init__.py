"""veRL's own trainer, `python -m verl.trainer.main_ppo`, on a CPU and with this package serving."""
