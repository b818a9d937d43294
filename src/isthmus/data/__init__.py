"""Training data: text or conversations, tokenised and packed into samples that are read by number."""

from isthmus.data.dataset import Dataset, TokenBatch, open_dataset, open_job_data
from isthmus.data.prompts import Prompt, PromptSet, open_prompts
from isthmus.data.tokenizer_export import export_tokenizer

__all__ = [
    "Dataset",
    "Prompt",
    "PromptSet",
    "TokenBatch",
    "export_tokenizer",
    "open_dataset",
    "open_job_data",
    "open_prompts",
]
