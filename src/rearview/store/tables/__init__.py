"""Records as SQL tables: converted to Parquet, pivoted, queried with DuckDB."""
