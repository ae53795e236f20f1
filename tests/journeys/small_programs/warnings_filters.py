import warnings

print([(f[0], f[2].__name__, f[4]) for f in warnings.filters])
warnings.simplefilter("once")
for i in range(3):
    warnings.warn("once only")
warnings.simplefilter("always")
for i in range(2):
    warnings.warn("each time", FutureWarning)
with warnings.catch_warnings(record=True) as caught:
    for i in range(2):
        warnings.warn("caught", RuntimeWarning)
print([(w.lineno, w.category.__name__, str(w.message), w.filename == __file__) for w in caught])
warnings.simplefilter("error")
for i in range(2):
    warnings.warn("an error", UserWarning)
