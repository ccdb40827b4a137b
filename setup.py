"""Builds the optional C extensions; everything else stands in pyproject.toml.

Without a compiler the build goes on: numpy does the work of the kernels, slower, and the verbs transport says
what it misses. Neither libibverbs nor its headers are needed to build.

The delta kernels also run inside of jit through XLA's FFI. Its headers come from a jaxlib that is a build
requirement in pyproject.toml, the oldest supported one: a newer runtime takes handlers built with older
headers, not the other way round. So `pip install .` builds one file for all. With `--no-build-isolation`
the jaxlib of the environment is taken if it has that version; else name the folder of the headers in
JAXRL_SYNC_FFI_INCLUDE, or do without (plain XLA).
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))

FFI_JAXLIB = "0.10.2"  # as in build-system.requires of pyproject.toml


def ffi_include() -> list[str]:
    """The folder with xla/ffi/api/c_api.h, or nothing."""
    named = os.environ.get("JAXRL_SYNC_FFI_INCLUDE")
    if named:
        return [named]
    try:
        jaxlib = importlib.metadata.distribution("jaxlib")
    except importlib.metadata.PackageNotFoundError:
        return []
    folder = Path(str(jaxlib.locate_file("jaxlib"))) / "include"
    if jaxlib.version == FFI_JAXLIB and (folder / "xla/ffi/api/c_api.h").is_file():
        return [str(folder)]
    print(
        f"no FFI kernels: they need the headers of jaxlib {FFI_JAXLIB}, found {jaxlib.version}",
        file=sys.stderr,
    )
    return []


FFI_INCLUDE = ffi_include()

KERNELS = Extension(
    "jaxrl_sync.sharding._kernels",
    sources=[
        f"cext/{name}.c"
        for name in (
            *("kernelsmodule", "copies", "sums", "summed", "parallel", "stream"),
            *("deltamodule", "delta", "scan", "codings", "apply", "ffi_shim"),
            *("placesmodule", "places"),
        )
    ],
    depends=["cext/kernels.h", "cext/delta.h", "cext/scan.h", "cext/keys.h", "cext/places.h"],
    include_dirs=["cext", *FFI_INCLUDE],
    define_macros=[
        *([] if FREE_THREADED else [("Py_LIMITED_API", "0x030B0000")]),
        *([("JAXRL_FFI", "1")] if FFI_INCLUDE else []),
    ],
    extra_compile_args=["-std=gnu11", "-O3", "-Wall", "-Wextra", "-Werror", "-pthread"],
    extra_link_args=["-pthread"],
    optional=True,
    py_limited_api=not FREE_THREADED,
)

VERBS = Extension(
    "jaxrl_sync.transfer._verbs",
    sources=[
        f"cext/verbs/{name}.c"
        for name in ("module", "context", "region", "cq", "qp", "state", "post", "ibv_dl")
    ],
    depends=["cext/verbs/verbs.h", "cext/verbs/ibv_abi.h", "cext/verbs/ibv_dl.h"],
    include_dirs=["cext/verbs"],
    extra_compile_args=[
        "-std=gnu11",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fvisibility=hidden",
        "-pthread",
    ],
    extra_link_args=["-pthread", "-ldl"],
    optional=True,
    py_limited_api=not FREE_THREADED,
)

setup(ext_modules=[KERNELS, VERBS])
