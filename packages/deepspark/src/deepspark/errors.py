"""The error tree of deepspark; every message says what was expected, what came and what to do.

DeepSparkError
├── ConfigError       a setting, or a combination of settings, that cannot be honoured
├── CheckpointError   a drafter's files do not fit its configuration or its target
└── InputError        a call got tensors or numbers of the wrong shape, type or range
"""

__all__ = ["CheckpointError", "ConfigError", "DeepSparkError", "InputError"]


class DeepSparkError(Exception):
    """Base of every error that deepspark raises on purpose."""


class ConfigError(DeepSparkError, ValueError):
    """A setting, or a combination of settings, cannot be honoured."""


class CheckpointError(DeepSparkError, ValueError):
    """A drafter's files do not fit its configuration or its target."""


class InputError(DeepSparkError, ValueError):
    """A call got tensors or numbers of the wrong shape, type or range."""
