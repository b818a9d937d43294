"""Training data: text or conversations, tokenised, packed into samples, and given out by sample number."""

from isthmus.data.dataset import Batch, Dataset, open_dataset

__all__ = ["Batch", "Dataset", "open_dataset"]
