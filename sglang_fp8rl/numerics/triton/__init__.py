"""The casts and tables on a GPU, through Triton."""
