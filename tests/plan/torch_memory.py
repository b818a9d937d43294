"""What torch itself says of a small model's memory: kept tensors, and the allocator's fullest moment."""

import gc
import warnings

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from isthmus.core.model import Model
from isthmus.core.model_parts.standard_keys import with_standard_keys

SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 500,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 48, "num_experts": 16, "num_experts_per_tok": 4, "decoder_sparse_step": 1}
DEEPSEEK = {
    "head_dim": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
}
OLDER = {"head_dim": None, "num_key_value_heads": None, "intermediate_size": None}
FAMILIES = {
    "LlamaForCausalLM": ("llama", {}),
    "Qwen2ForCausalLM": ("qwen2", {"head_dim": None}),
    "Qwen3ForCausalLM": ("qwen3", {}),
    "MistralForCausalLM": ("mistral", {"sliding_window": 64}),
    "GemmaForCausalLM": ("gemma", {}),
    "Gemma2ForCausalLM": ("gemma2", {}),
    "Gemma3ForCausalLM": ("gemma3_text", {}),
    "PhiForCausalLM": ("phi", {"head_dim": None, "num_key_value_heads": 8}),
    "Phi3ForCausalLM": ("phi3", {"head_dim": None}),
    "MixtralForCausalLM": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "Qwen2MoeForCausalLM": (
        "qwen2_moe",
        {"head_dim": None, "shared_expert_intermediate_size": 128, **EXPERTS},
    ),
    "Qwen3MoeForCausalLM": ("qwen3_moe", EXPERTS),
    "DeepseekV2ForCausalLM": ("deepseek_v2", DEEPSEEK),
    "DeepseekV3ForCausalLM": ("deepseek_v3", DEEPSEEK),
    "GPT2LMHeadModel": ("gpt2", OLDER | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "GPTNeoXForCausalLM": ("gpt_neox", OLDER | {"intermediate_size": 352}),
    "OPTForCausalLM": ("opt", OLDER | {"ffn_dim": 352, "word_embed_proj_dim": 128, "dropout": 0.0}),
    "MptForCausalLM": ("mpt", OLDER),
    "FalconForCausalLM": ("falcon", OLDER | {"multi_query": True, "parallel_attn": True}),
    "BloomForCausalLM": ("bloom", OLDER),
    "GptOssForCausalLM": (
        "gpt_oss",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 64},
    ),
}


def small(architecture, *, kernel=None, precision="fp32", **over):
    """Return a small model of a family: the noun, and the torch module in training mode."""
    kind, extra = FAMILIES[architecture]
    fields = {key: value for key, value in (SMALL | extra | over).items() if value is not None}
    config = CONFIG_MAPPING[kind](**fields)
    config.use_cache = False
    attention = {"attn_implementation": {"fused": "sdpa", "eager": "eager"}[kernel]} if kernel else {}
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, **attention)
    if precision == "bf16":
        module = module.to(torch.bfloat16)
    noun = Model(
        path="small",
        architecture=architecture,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        config=with_standard_keys(architecture, config.to_dict()),
    )
    return noun, module.train()


def recompute_all(module):
    """Let every layer keep only its input."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the name it had in transformers 5.0
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def tokens(module, batch, length):
    """Return random token ids, int64[batch, length]."""
    return torch.randint(3, module.config.vocab_size - 1, (batch, length))


def kept_bytes(module, ids):
    """Return the bytes of the distinct storages that autograd keeps after a forward pass, weights aside."""
    own = {one.untyped_storage().data_ptr() for one in (*module.parameters(), *module.buffers())}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module(input_ids=ids, labels=ids).loss
    total = sum(seen.values())
    loss.backward()
    module.zero_grad(set_to_none=False)
    return total


def peak_bytes(module, ids):
    """Return the most bytes that the CPU allocator held during a forward and backward pass, beyond the start.

    Gradients exist already, as in every micro-batch but the first.
    """

    def step():
        module(input_ids=ids, labels=ids).loss.backward()

    step()
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            step()
        events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = top = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        held += event.nbytes()
        top = max(top, held)
    return top
