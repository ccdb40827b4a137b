"""The certificate that the HTTP servers of a run answer with, as ``[hub] tls`` says."""

from __future__ import annotations

from pathlib import Path

from jaxrl_sync.config.sections import RunConfig
from jaxrl_sync.transfer import tls


def server_tls(config: RunConfig, run_dir: Path) -> tls.ServerTls | None:
    """Certificate and key of hub and engines; None for plain HTTP.

    ``self-signed`` makes one in the run directory the first time. ResourceError when that can't be done.
    """
    hub = config.hub
    if hub.tls == "self-signed":
        return tls.of_run(run_dir)
    if hub.tls == "off" or hub.tls_cert is None or hub.tls_key is None:
        return None
    ca = Path(hub.tls_ca).absolute() if hub.tls_ca is not None else None
    return tls.ServerTls(Path(hub.tls_cert), Path(hub.tls_key), ca)
