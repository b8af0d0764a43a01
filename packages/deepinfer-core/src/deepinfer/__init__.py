"""DeepInfer: an inference engine for DeepSeek-V4.1-Flash and V4-Flash."""
