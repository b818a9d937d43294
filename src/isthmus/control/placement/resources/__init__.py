"""The requirement of a job, and the free resources."""
