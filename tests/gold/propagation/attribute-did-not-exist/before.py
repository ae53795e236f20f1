class Trainer:
    def __init__(self, model):
        self.model = model

    def step(self, batch):
        loss = self.model(batch)
        loss.backward()
