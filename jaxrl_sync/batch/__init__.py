"""Rollout records, packing, the batch frame and its data connection. numpy only: never imports jax."""
