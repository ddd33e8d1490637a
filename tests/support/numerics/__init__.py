"""Cases, oracles and other backends for the casts."""
