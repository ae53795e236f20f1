"""Records as tables: sealed into Parquet, pivoted, asked with SQL."""
