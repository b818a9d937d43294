"""Reads lists of arguments with Megatron-LM's own parser: JSON in, JSON out. Run as a process of its own.

In: `[{"world": 16, "arguments": [...]}, ...]`. Out, one each: what the parser, its validation and the layout
came to, or `{"refused": "why"}`. Validation asks for the architecture of a GPU, which no test machine has: it
gets 9 (Hopper). Nothing else is replaced.
"""

import json
import sys
import types

import torch

torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9, minor=0, name="H100")
torch.cuda.get_device_capability = lambda *_: (9, 0)

from megatron.core.transformer.enums import LayerType  # noqa: E402
from megatron.training import arguments  # noqa: E402


def read(arguments_given: list[str], world: int) -> dict:
    """Return what the real parser makes of a command line."""
    sys.argv = ["pretrain_gpt.py", *arguments_given]
    args = arguments.parse_args()
    args.world_size, args.rank = world, 0
    arguments.validate_args(args)
    config = arguments.core_transformer_config_from_args(args)
    layout = config.pipeline_model_parallel_layout
    pp, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    parts = None
    if layout is not None:
        layout.validate_layer_layout(args.num_layers, None)
        parts = [[layout.layout[s][c].count(LayerType.decoder) for s in range(pp)] for c in range(chunks)]
    return {
        "dp": args.data_parallel_size,
        "pp": pp,
        "tp": config.tensor_model_parallel_size,
        "cp": config.context_parallel_size,
        "ep": config.expert_model_parallel_size,
        "sp": config.sequence_parallel,
        "parts": parts,
        "micro_batch_size": args.micro_batch_size,
        "global_batch_size": args.global_batch_size,
        "sequence_length": args.seq_length,
        "hidden_size": config.hidden_size,
        "experts": config.num_moe_experts,
        "recompute": [config.recompute_granularity, config.recompute_method, config.recompute_num_layers],
        "distributed_optimizer": args.use_distributed_optimizer,
        "bf16": config.bf16,
        "vocabulary": args.padded_vocab_size,
    }


def main() -> None:
    """Answer every request."""
    answers = []
    for request in json.load(sys.stdin):
        try:
            answers.append(read(request["arguments"], request["world"]))
        except (Exception, SystemExit) as error:
            answers.append({"refused": f"{type(error).__name__}: {error}"})
    sys.__stdout__.write("\nANSWER " + json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
