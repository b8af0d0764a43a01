"""DeepSpec-style drafters: configuration, layers, context caches, checkpoints and training losses."""

from deepspark.deepspec.backbone import DeepSpecBackbone
from deepspark.deepspec.checkpoint import load_drafter, load_weights
from deepspark.deepspec.config import DeepSpecConfig, TargetFacts
from deepspark.deepspec.model import DeepSpecModel

__all__ = ["DeepSpecBackbone", "DeepSpecConfig", "DeepSpecModel", "TargetFacts", "load_drafter", "load_weights"]
