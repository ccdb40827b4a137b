"""The asynchronous loop: five asyncio components around pure accounting. Never imports jax."""

from __future__ import annotations
