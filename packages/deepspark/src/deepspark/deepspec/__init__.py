"""DeepSpec-style drafters: configuration, layers, context caches, checkpoints and training losses."""

from .backbone import DeepSpecBackbone
from .checkpoint import load_drafter, load_weights
from .config import DeepSpecConfig, TargetFacts
from .model import DeepSpecModel

__all__ = ["DeepSpecBackbone", "DeepSpecConfig", "DeepSpecModel", "TargetFacts", "load_drafter", "load_weights"]
