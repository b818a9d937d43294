"""Commands that run as long-lived processes: serve, agent, links, switch."""
