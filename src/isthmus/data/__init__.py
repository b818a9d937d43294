"""Training data: text or conversations, tokenised and packed into samples that are read by number."""

from isthmus.data.dataset import Dataset, TokenBatch, open_dataset
from isthmus.data.tokenizer import tokenizer_file

__all__ = [
    "Dataset",
    "TokenBatch",
    "open_dataset",
    "tokenizer_file",
]
