"""The filters of placement: compute, network and storage, with their refusals."""
