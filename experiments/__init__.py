"""What autoshard is tried on: workloads, hand-made shardings of experts, and fair timing."""
