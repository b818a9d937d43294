"""Commands for the owners of sites: their agents, images and rendered parts."""
