"""The HTML report of a job, and its trace."""
