"""The courier: carries the files of a worker's run folder between the agent and nodes that do not share its disk."""
