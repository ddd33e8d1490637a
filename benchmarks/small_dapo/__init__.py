"""A DAPO run small enough for a 2-core CPU, with a real SGLang server for its rollouts."""
