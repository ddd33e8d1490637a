"""The seam to SGLang's server: hooks, registration, status, routes."""
