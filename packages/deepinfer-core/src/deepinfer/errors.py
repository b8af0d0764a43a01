"""The error tree of DeepInfer: what can go wrong, by who has to act.

    DeepInferError
    ├── ConfigError        a choice that cannot be honoured: fix the argument or the environment variable
    ├── AcceleratorError   a missing device, driver or wheel, or one that does not fit: fix the installation
    ├── CheckpointError    a model folder that is incomplete, damaged or not ours: fix the files
    └── RequestError       one prompt or its sampling parameters: fix that request, the others go on

Every text says what was expected, what came and what to do. `assert` is for our own mistakes only.
"""


class DeepInferError(Exception):
    """Root of every error that DeepInfer raises on purpose."""


class ConfigError(DeepInferError):
    """A setting that cannot be honoured; raised before anything is built."""


class AcceleratorError(DeepInferError):
    """An accelerator that is missing, broken or written for another contract version."""


class CheckpointError(DeepInferError):
    """A checkpoint that is missing, incomplete, damaged or of an unknown architecture; names file and tensor."""


class RequestError(DeepInferError):
    """A request that can never be served as it is; ends that request, never the engine."""
