"""RDMA verbs below the transports: devices, ports and GIDs, records of completions, endpoints, backends."""
