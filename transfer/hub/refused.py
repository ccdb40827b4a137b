"""The hub understood a call and said no."""

from __future__ import annotations

from jaxrl_sync.transfer.errors import TransferError


class HubRefused(TransferError):
    """The hub understood a call and refused it; ``code`` says why in one word."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"the hub refused: {message}")
        self.code = code
