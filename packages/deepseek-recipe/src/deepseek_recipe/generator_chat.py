class ChatCompletionChunkGenerator:
    def __init__(self, request, id, model): pass
