"""Operations on whole runs and stores: collect garbage, verify, remove, push and pull."""
