"""How a site's traffic crosses its links, by `pool.yaml` alone: what is chosen, and the processes that carry it."""
