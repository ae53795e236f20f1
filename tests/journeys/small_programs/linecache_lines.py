import linecache

for n in range(1, 5):
    print(repr(linecache.getline(__file__, n)))
print(linecache.getlines(__file__)[-1], sorted(linecache.cache) == [__file__])
