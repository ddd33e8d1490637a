"""Random runs of requests against a model of the bytes and one of the law: `make fuzz`, and a short one in the suite."""
