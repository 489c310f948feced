"""How a training is started: settings, the commands composed from them, and running those."""
