"""The ground floor: what every room needs and nothing else. Imports nothing of ours."""
