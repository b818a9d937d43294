"""The files of jobs at a site: where their paths lead, and copies from other sites."""
