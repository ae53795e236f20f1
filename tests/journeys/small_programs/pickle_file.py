import pickle


class Config:
    def __init__(self):
        self.values = {}


config = Config()
for i in range(5):
    config.values[i] = i * i
    with open("config.pkl", "wb") as file:
        pickle.dump(config, file)
with open("config.pkl", "rb") as file:
    print(pickle.load(file).values)
