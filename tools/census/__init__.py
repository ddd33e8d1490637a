"""Every model class of SGLang's registry, made small and judged: is a replayed refit what a fresh load is?"""
