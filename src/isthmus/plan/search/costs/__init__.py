"""What a stage costs at a node group: seconds, bytes, and the routes between clusters."""
