"""The hub: a directory of versions and members; it holds no weights and never imports jax."""
