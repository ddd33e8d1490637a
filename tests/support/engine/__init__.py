"""Real schedulers commanded over a pipe, the pool that lends them, and what runs inside them."""
