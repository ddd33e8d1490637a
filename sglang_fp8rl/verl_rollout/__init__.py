"""veRL's SGLang rollout where veRL and a supported SGLang disagree. Imported when it is used."""
