"""Networks that no library offers in the form the benchmark needs. A network knows nothing of ranks, precision or timing."""
