"""API-exact prompts, tokens and parsing for DeepSeek models. It never needs torch."""

from deepseek_recipe.conversation import *
from deepseek_recipe.encoding import *
from deepseek_recipe.tokenizer import *
from deepseek_recipe.special_tokens import *
from deepseek_recipe.errors import *
