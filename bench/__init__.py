"""`make bench`: every figure beside a peer in the same run, as a ratio. Machines are noisy; ratios last."""
