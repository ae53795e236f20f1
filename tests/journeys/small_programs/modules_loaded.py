import sys

print([name for name in ("torch", "numpy", "pandas", "duckdb", "click", "rich", "scipy", "pyarrow") if name in sys.modules])
