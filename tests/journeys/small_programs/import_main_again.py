import sys

print("running as", __name__)
if __name__ == "__main__":
    import import_main_again as other

    print(other is sys.modules["__main__"], other.__name__, other.__file__ == __file__, other.__spec__.origin)
