"""Arrays of several processes: every process sees the shards of all of them, and plans the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]

WORLD = """
import json, sys
import jax
rank, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
import jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jaxrl_sync.sharding import Layout, MappingError, make_pool, plan, reshard, trace
devices = np.array(jax.devices()).reshape(2, 4)
on = Mesh(devices, ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))
to = Mesh(devices.reshape(-1)[:4], ("tp",))
sharding = NamedSharding(on, P("x", "y"))
host = np.arange(64.0, dtype=np.float32).reshape(8, 8)
params = {"w": jax.make_array_from_callback((8, 8), sharding, lambda i: host[i])}
target = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(to, P(None, "tp")))}
layout = Layout.of(params)
corr = trace(lambda t: {"w": t["w"].T}, params, target)
made = plan(corr.export_layout, Layout.of(target), corr)
def refused(act):
    try:
        act()
    except MappingError as error:
        return str(error)
here = Mesh(np.array(jax.local_devices()), ("a",))
def planned(source, over):
    tree = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(over, P("a")))}
    found = trace(lambda t: {"w": t["w"].T}, {"w": source}, tree)
    return plan(found.export_layout, Layout.of(tree), found)
def moved(source, over, path=None):
    return reshard({"w": source}, planned(source, over), path=path)["w"]
mine = jax.device_put(host, NamedSharding(here, P(None, "a")))
everywhere = Mesh(devices.reshape(-1), ("a",))
own = [np.array_equal(np.asarray(moved(mine, here, path)), host.T) for path in (None, "device")]
print("SEEN", json.dumps({
    "own": own, "refused": [
      refused(lambda: reshard(params, made)), refused(lambda: make_pool(planned(mine, everywhere))),
    *(refused(lambda: moved(source, over, path)) for path in ("host", "device")
      for source, over in ((params["w"], here), (mine, everywhere)))],
    "layout": layout.digest, "plan": made.digest, "processes": sorted(set(layout.devices.values())),
    "boxes": len(layout["w"].placement.by_box), "sends": made.for_rank(rank).total_bytes,
    "same": Layout.of({"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)}) == layout,
}))
"""


@pytest.mark.slow
def test_both_processes_of_a_world_describe_and_plan_the_same() -> None:
    port = str(free_port())
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WORLD, str(rank), port], env=env, cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        ends = [p.communicate(timeout=250) for p in ranks]
    finally:
        for p in ranks:
            p.kill()
    assert [p.returncode for p in ranks] == [0, 0], ends[0][1][-1500:] + ends[1][1][-1500:]
    lines = [next(line for line in out.splitlines() if line.startswith("SEEN")) for out, _ in ends]
    first, second = (json.loads(line.removeprefix("SEEN ")) for line in lines)
    assert first["processes"] == [0, 1] and first["boxes"] == 8 and first["same"]
    assert (first["layout"], first["plan"]) == (second["layout"], second["plan"])
    assert first["sends"] + second["sends"] == 8 * 8 * 4
    for seen in (first, second):  # each moves what is its own, and says what isn't, where jax had KeyErrors
        assert seen["own"] == [True, True] and len(seen["refused"]) == 6
        assert all("are not devices of this process" in str(words) for words in seen["refused"]), seen
