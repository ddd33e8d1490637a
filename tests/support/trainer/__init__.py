"""Models and processes of the trainer's side."""
