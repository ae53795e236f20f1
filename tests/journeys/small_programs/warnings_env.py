# env: PYTHONWARNINGS=error::DeprecationWarning,ignore::UserWarning
import sys
import warnings

print(sys.warnoptions)
for i in range(2):
    warnings.warn("ignored")
warnings.warn("old", DeprecationWarning)
