class ResponsesChunkGenerator:
    def __init__(self, request, id, model): pass
