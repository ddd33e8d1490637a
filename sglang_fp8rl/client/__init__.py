"""A small HTTP client: send weights to a running SGLang server in buckets. torch and requests only."""

from .refit_client import RefitClient, fetch_plan

__all__ = ["RefitClient", "fetch_plan"]
