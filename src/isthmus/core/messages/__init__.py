"""What crosses process boundaries: server and agent, server and user, agent and worker."""
