"""What the owner of a site writes: the policy for pool jobs and the site's scheduler."""
