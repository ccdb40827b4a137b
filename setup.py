"""Builds the optional C extensions; everything else stands in pyproject.toml.

Without a compiler the build goes on and numpy does the same work, slower.
"""

from __future__ import annotations

import sysconfig

from setuptools import Extension, setup

FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))

KERNELS = Extension(
    "jaxrl_sync.sharding._kernels",
    sources=["cext/kernelsmodule.c", "cext/copies.c", "cext/sums.c", "cext/parallel.c"],
    depends=["cext/kernels.h"],
    include_dirs=["cext"],
    extra_compile_args=["-std=gnu11", "-O3", "-Wall", "-Wextra", "-Werror", "-pthread"],
    extra_link_args=["-pthread"],
    optional=True,
    py_limited_api=not FREE_THREADED,
)

setup(ext_modules=[KERNELS])
