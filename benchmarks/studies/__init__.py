"""Studies that are finished: the numbers are on their pages, the commands in README.md."""
