"""Training data: text or conversations, tokenised and packed into samples that are read by number."""

from isthmus.data.dataset import Batch, Dataset, open_dataset

__all__ = ["Batch", "Dataset", "open_dataset"]
