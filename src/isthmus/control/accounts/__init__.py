"""Projects, groups and users: their tree, what they hold and have used this month, and their limits. Pure."""
