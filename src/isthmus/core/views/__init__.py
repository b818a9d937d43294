"""What the REST interface and its clients exchange about jobs, sites, money and access."""
