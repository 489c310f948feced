"""What lets people try the rollout buffer, and learn with it, without devices, engines and GPUs."""
