"""Records as SQL tables: sealed into Parquet, pivoted, queried with DuckDB."""
