import warnings


def old():
    warnings.warn("old is old", DeprecationWarning, stacklevel=2)


for i in range(3):
    old()
    warnings.warn(f"in the loop {i}")
warnings.warn("deep", stacklevel=50)
warnings.warn_explicit("explicit", UserWarning, "other.py", 3)
