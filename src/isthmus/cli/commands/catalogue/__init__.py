"""The commands on the catalogue of models and data sets."""
