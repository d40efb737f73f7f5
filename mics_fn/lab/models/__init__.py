"""What the demo and the benches train, and on what text."""
