"""Which addresses a program may contact that a user has named."""
