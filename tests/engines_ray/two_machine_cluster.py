"""Run a federation on a Ray cluster of two machines, remove one, and print the outcome as JSON.

The machines are processes with separate shared memories. It is a script because a process joins only one cluster.
"""

from __future__ import annotations

import json
import os
from functools import partial
from typing import Any

os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b" * 64, "RAY_USAGE_STATS_ENABLED": "0"}

import ray
from ray.cluster_utils import Cluster

from descant import Federation, Sgd, algorithms
from descant.engines import Ray
from descant.errors import EngineError
from toy_problems import classification_parties, wide_network


def nodes_with_party_state(fed: Federation) -> list[list[str]]:
    """Return, by party, the machines that have its state."""
    party_states: Any = fed.engine_.party_states
    references = [party_states.peek(party).object_ref for party in party_states.names()]
    locations = ray.experimental.get_object_locations(references)
    return [sorted(locations[place]["node_ids"]) for place in references]


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    engine = Ray(address=cluster.address)
    solver = Sgd(lr=0.05, epochs=2, batch=4, optimizer="Adam")
    fed = Federation(
        wide_network, partial(classification_parties, 6), algorithms.FedAvgPlus(), solver=solver, seed=7, engine=engine
    )
    nodes_by_fit = [nodes_with_party_state(fed.fit(rounds, progress=False)) for rounds in (2, 1, 3)]
    cluster.remove_node(second, allow_graceful=False)
    error_message = ""
    try:
        fed.fit(1, progress=False)
    except EngineError as error:
        error_message = str(error)
    print(
        json.dumps(
            {
                "workers": len(engine._workers),
                "machines": nodes_by_fit,
                "second": second.node_id,
                "error": error_message,
            }
        ),
        flush=True,
    )
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
