"""GPT-2: a learned table is added to the tokens; queries, keys and values come from one projection."""

from hf_posenc.architecture import Architecture

ARCHITECTURE = Architecture(
    model_type="gpt2",
    attention="h.*.attn",
    projections=(("c_attn", ("query", "key", "value")),),
    adapted=("c_attn",),
    checked="activation_function",
    table="wpe",
)
