"""Buckets of a layout seen before, written without their loaders."""
