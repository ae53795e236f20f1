def encode(texts):
    ids = []
    for text in texts:
        for sentence in sentences(text):
            parts = tokenize(sentence)
            print(len(parts))
            ids.append(parts)
    return ids
