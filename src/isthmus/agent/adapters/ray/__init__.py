"""The `ray` adapter: cards of a Ray cluster, held by placement groups of a holder job, over the Jobs API."""
