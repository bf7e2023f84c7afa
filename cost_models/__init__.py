"""What things cost on a device mesh: chips, collectives, compute, memory, and what XLA says."""
