"""What users and workers may use at a site: storage roots, accounts, containers."""
