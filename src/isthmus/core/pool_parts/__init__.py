"""Parts of a pool's clusters that have a file of their own."""
