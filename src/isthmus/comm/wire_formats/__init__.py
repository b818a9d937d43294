"""Wire formats: values that cross the network between clusters in fewer bytes, each format with its error bound."""
