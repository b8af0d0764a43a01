class MessagesChunkGenerator:
    def __init__(self, id, model, thinking): pass
