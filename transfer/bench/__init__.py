"""``jaxrl-sync verbs bench``: bandwidth and latency between two processes, with what arrived compared."""
