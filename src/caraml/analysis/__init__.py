"""What follows from records: flat tables, queries, series of raw numbers."""
