"""What SGLang's own loaders write, caught and cast."""
