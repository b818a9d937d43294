"""The `kubernetes` adapter: cards of a Kubernetes cluster, held by workloads and used by the ranks in their pods."""
