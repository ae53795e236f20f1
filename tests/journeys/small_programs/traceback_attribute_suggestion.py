class Model:
    learning_rate = 1


for i in range(2):
    Model().learning_rat
