"""Published configurations (dimension fields of their `config.json`) and their parameter counts.

The counts are those of the model classes in transformers; `test_profile_torch.py` checks them.
"""

from pathlib import Path

from isthmus.core.model import Model, load_model

CONFIGS = Path(__file__).parent / "configs"

PARAMETERS = {
    "bloom-176b": 176_247_271_424,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
    "falcon-40b": 41_303_293_952,
    "falcon-7b": 6_921_720_704,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2b": 2_506_172_416,
    "gemma-3-1b": 999_885_952,
    "gemma-7b": 8_537_680_896,
    "gpt-neox-20b": 20_554_567_680,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-2-70b": 68_976_648_192,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-nemo-12b": 12_247_782_400,
    "mixtral-8x22b": 140_620_634_112,
    "mixtral-8x7b": 46_702_792_704,
    "mpt-7b": 6_649_286_656,
    "opt-6.7b": 6_658_473_984,
    "phi-1.5": 1_418_270_720,
    "phi-2": 2_779_683_840,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2-0.5b": 494_032_768,
    "qwen2-57b-a14b": 57_408_658_944,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-8b": 8_190_735_360,
}
NAMES = sorted(PARAMETERS)


def published(name: str) -> Model:
    """Return the model of a published configuration."""
    return load_model(CONFIGS / f"{name}.json")
