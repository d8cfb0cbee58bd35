"""What must hold of models, losses and loops; each check refuses what it finds."""
