"""The report of a run: one self-contained HTML page, from the files in its directory alone. No jax."""
