"""What the last refit did, and whether the served weights are of one piece."""
