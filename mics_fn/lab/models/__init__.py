"""The model that the demo and the benches train, and its text."""
