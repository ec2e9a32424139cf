"""What tests share: the laws and their samples, the specifications, real processes, models. No test imports a test."""
