def encode(texts):
    ids = []
    for text in texts:
        tokens = tokenize(text)
        print(len(tokens))
        ids.append(tokens)
    return ids
