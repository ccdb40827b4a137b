"""Builds the optional C extensions; everything else stands in pyproject.toml.

Without a compiler the build goes on: numpy does the work of the kernels, slower, and the verbs transport says
what it misses. Neither libibverbs nor its headers are needed to build.
"""

from __future__ import annotations

import sysconfig

from setuptools import Extension, setup

FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))

KERNELS = Extension(
    "jaxrl_sync.sharding._kernels",
    sources=[
        f"cext/{name}.c"
        for name in ("kernelsmodule", "copies", "sums", "parallel", "deltamodule", "delta", "codings", "apply")
    ],
    depends=["cext/kernels.h", "cext/delta.h"],
    include_dirs=["cext"],
    define_macros=[] if FREE_THREADED else [("Py_LIMITED_API", "0x030B0000")],
    extra_compile_args=["-std=gnu11", "-O3", "-Wall", "-Wextra", "-Werror", "-pthread"],
    extra_link_args=["-pthread"],
    optional=True,
    py_limited_api=not FREE_THREADED,
)

VERBS = Extension(
    "jaxrl_sync.transfer._verbs",
    sources=[
        f"cext/verbs/{name}.c" for name in ("module", "context", "region", "cq", "qp", "state", "post", "ibv_dl")
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
