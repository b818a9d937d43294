"""Messages between processes: server and agent, server and user, agent and worker."""
