"""What travels between trainer and server: buckets, layouts, pairs, the plan. Torch only."""
