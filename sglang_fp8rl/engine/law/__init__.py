"""Where a refit begins and ends, how it ended, and what is served after it."""
