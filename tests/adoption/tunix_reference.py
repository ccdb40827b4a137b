"""What Tunix's own rollout says to prompts under weights that it is given: in Tunix's environment.

``python tunix_reference.py EXAMPLES WEIGHTS.npz PROMPTS``; prints one JSON list of completions.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def main(examples: str, weights: str, prompts: str) -> None:
    """Weights go in by Tunix's own ``update_params``; jaxrl_sync has no part in it."""
    sys.path.insert(0, examples)
    example = importlib.import_module("tunix_rollout")
    jax, nnx, np = example.jax, example.nnx, example.np
    rollout = example.make_rollout()
    state = nnx.state(rollout.model(), nnx.Param)
    saved = np.load(weights)

    def given(path: Any, old: Any) -> Any:
        return jax.device_put(saved["/".join(str(key.key) for key in path)], old.sharding)

    tree = jax.tree_util.tree_map_with_path(given, nnx.to_pure_dict(state))
    nnx.replace_by_pure_dict(state, tree)
    rollout.update_params(state)
    print(json.dumps(example.generate(rollout, json.loads(prompts))))


if __name__ == "__main__":
    main(*sys.argv[1:])
