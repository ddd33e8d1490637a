"""Toys, each with one habit of a model class of SGLang's, for tests of what an update leaves."""
