"""A Ray cluster of a head without CPUs and two nodes with one each, all on this machine.

Says its address; a line on stdin takes a node away as if its machine had failed; the end of stdin ends it.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    how = {"node_ip_address": "127.0.0.1", "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**how, "num_cpus": 0, "temp_dir": sys.argv[1]})
    nodes = [cluster.add_node(**how, num_cpus=1, object_store_memory=100 * 2**20) for _ in range(2)]
    print(cluster.address, flush=True)
    for _ in sys.stdin:
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        print("gone", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
