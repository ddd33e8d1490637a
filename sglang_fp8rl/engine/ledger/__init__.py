"""What came in which call, and where it was written: facts, for whoever repeats or judges an update."""
