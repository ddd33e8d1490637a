"""The final copies of a loader, seen from inside."""
