"""The casts and tables on a CPU, through Numba."""
