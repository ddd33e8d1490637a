"""What an update brings, before anything is written."""
