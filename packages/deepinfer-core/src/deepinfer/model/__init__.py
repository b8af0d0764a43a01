"""DeepSeek-V4.1-Flash and V4-Flash on top of the accelerator contract: configuration, weights, cache memory, layers."""
