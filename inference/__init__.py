"""The inference engine: continuous batching, sampling, versions per token, swaps between decode steps."""
