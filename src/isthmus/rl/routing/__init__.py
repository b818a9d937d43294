"""The experts that engines report beside tokens, so that training takes the same ones."""
