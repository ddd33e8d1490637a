"""Random models, served and alone, through random updates: see `judge.py`. `make random-loading` takes new seeds."""
