"""Versions of weights: named by their content, and lossless deltas between them, as files."""

from isthmus.weights.apply_delta import apply_delta
from isthmus.weights.change_code import decode_changes, encode_changes
from isthmus.weights.delta_error import DeltaError
from isthmus.weights.delta_summary import DeltaSummary
from isthmus.weights.write_delta import write_delta

__all__ = ["DeltaError", "DeltaSummary", "apply_delta", "decode_changes", "encode_changes", "write_delta"]
