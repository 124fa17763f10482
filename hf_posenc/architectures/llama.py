"""LLaMA: queries and keys are rotated by angles that one module computes for all layers; grouped-query attention."""

from hf_posenc.architecture import Architecture

ARCHITECTURE = Architecture(
    model_type="llama",
    attention="layers.*.self_attn",
    projections=(("q_proj", ("query",)), ("k_proj", ("key",))),
    adapted=("q_proj", "k_proj", "v_proj", "o_proj"),
    checked="hidden_act",
    rotary="rotary_emb",
)
