"""The web console: its static bundle, the policy of its pages, and the endpoints of its sessions."""
