"""What is served, as numbers that do not depend on the layout."""
