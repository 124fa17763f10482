"""Text to documents, to token blocks, to training samples."""

from hf_posenc.data.blocks import Block, Document, cut_blocks, pack_blocks
from hf_posenc.data.dataset import (
    Collator,
    Curriculum,
    DataReport,
    Masking,
    Preparation,
    TrainingBlocks,
    make_blocks,
    mask_tokens,
    packed_positions,
)
from hf_posenc.data.documents import load_documents
from hf_posenc.data.positions import random_positions, skip_positions
from hf_posenc.data.tokens import special_tokens, tokenize_chat, tokenize_documents

__all__ = [
    "Block",
    "Collator",
    "Curriculum",
    "DataReport",
    "Document",
    "Masking",
    "Preparation",
    "TrainingBlocks",
    "cut_blocks",
    "load_documents",
    "make_blocks",
    "mask_tokens",
    "pack_blocks",
    "packed_positions",
    "random_positions",
    "skip_positions",
    "special_tokens",
    "tokenize_chat",
    "tokenize_documents",
]
