"""The only folder that imports sglang."""
