"""The plan of a built model, as the document that trainers read."""
