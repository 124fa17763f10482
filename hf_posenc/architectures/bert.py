"""BERT: a learned table is added to the tokens before a normalisation; attention looks both ways unless it decodes."""

from hf_posenc.architecture import Architecture

ARCHITECTURE = Architecture(
    model_type="bert",
    attention="encoder.layer.*.attention.self",
    projections=(("query", ("query",)), ("key", ("key",))),
    adapted=("query", "key", "value"),
    checked="hidden_act",
    table="embeddings.position_embeddings",
    table_buffers=("embeddings.position_ids", "embeddings.token_type_ids"),
    causal="is_decoder",
    token_types=True,
)
