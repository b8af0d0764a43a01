"""API-exact prompts, tokens and parsing for DeepSeek models. It never needs torch."""
