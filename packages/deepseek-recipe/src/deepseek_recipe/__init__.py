"""API-exact prompts, tokens and parsing for DeepSeek models. It never needs torch."""

from deepseek_recipe.conversation import *
from deepseek_recipe.encoding import *
from deepseek_recipe.tokenizer import *
from deepseek_recipe.special_tokens import *
from deepseek_recipe.errors import *
from deepseek_recipe.options import *
from deepseek_recipe.parsing_options import *
from deepseek_recipe.chat_request import *
from deepseek_recipe.messages_request import *
from deepseek_recipe.responses_request import *
from deepseek_recipe.echo import *
from deepseek_recipe.inference_chunk import *
from deepseek_recipe.generator_chat import *
from deepseek_recipe.generator_messages import *
from deepseek_recipe.generator_responses import *
from deepseek_recipe.response_chat import *
from deepseek_recipe.response_messages import *
from deepseek_recipe.response_responses import *
from deepseek_recipe.stream_processor import *
