"""The environment of each process of a run: platform, virtual devices, threads, memory, compilation cache."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from jaxrl_sync.config.sections import RoleSection

RUN_MARK = "JAXRL_SYNC_RUN_DIR"
"""Every process of a run, and whatever it starts, carries the run's directory under this name."""

HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""Asks glibc for transparent huge pages; other C libraries don't look at it."""

_DEVICE_FLAG = re.compile(r"--xla_force_host_platform_device_count=\S+")


def base_environment(inherited: Mapping[str, str], run_dir: Path) -> dict[str, str]:
    """What all processes share: the mark, unbuffered output, one compilation cache next to the run."""
    env = dict(inherited)
    env[RUN_MARK] = str(run_dir)
    env["PYTHONUNBUFFERED"] = "1"
    env.setdefault("JAX_COMPILATION_CACHE_DIR", str(run_dir.parent / ".xla-cache"))
    env.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    env.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    return env


def huge_pages(base: Mapping[str, str]) -> dict[str, str]:
    """``base`` with large buffers in huge pages, where the system gives them to who asks ("madvise").

    JAX's arrays on CPUs come from malloc, and numpy asks for its own; reading two versions of the weights in
    pages of 4 KiB takes about 15 % longer. Whoever has set the tunable keeps it.
    """
    tunables = [t for t in base.get("GLIBC_TUNABLES", "").split(":") if t]
    if not any(t.startswith("glibc.malloc.hugetlb=") for t in tunables):
        tunables.append(HUGE_PAGES)
    return {**base, "GLIBC_TUNABLES": ":".join(tunables)}


def role_environment(base: Mapping[str, str], role: RoleSection) -> dict[str, str]:
    """``base`` with what the role's section asks for; the section's own ``env`` table has the last word."""
    env = dict(base)
    env["JAX_PLATFORMS"] = role.platform
    flags = _DEVICE_FLAG.sub("", env.get("XLA_FLAGS", "")).split()
    if role.platform == "cpu":
        flags.append(f"--xla_force_host_platform_device_count={role.devices}")
    env["XLA_FLAGS"] = " ".join(flags)
    if role.threads:
        env["NPROC"] = env["OMP_NUM_THREADS"] = str(role.threads)
    if role.memory_fraction is not None:
        env["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{role.memory_fraction:g}"
    env.update(role.env)
    return env
