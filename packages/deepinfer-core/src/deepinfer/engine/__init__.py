"""The engine: from requests to tokens, one step at a time, over any model and accelerator of the contract."""
