"""What travels between trainer and server: buckets, layouts, the plan. Torch only."""
