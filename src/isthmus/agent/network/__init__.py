"""The network of a site, as its agent sees it: its own address, peers it reaches, and what links are promised."""
