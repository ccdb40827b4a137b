"""Tasks: where prompts come from and how answers are rewarded. No jax; see docs/tasks.md."""
