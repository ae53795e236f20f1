class Trainer:
    def __init__(self, model):
        self.model = model
        self.scaler = make_scaler()

    def step(self, batch):
        loss = self.model(batch)
        print(self.scaler.scale)
        loss.backward()
