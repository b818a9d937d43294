"""The files of jobs at a site: where their paths lead, copies from other sites, and versions of the catalogue."""
